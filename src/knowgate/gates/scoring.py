"""Run gates on questions: read the signals they need from a model in one pass, and check their scores.

Gates may be plugins, so everything they return is checked and their errors name them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from knowgate.core.registry import RegistryEntry
from knowgate.core.text import render_choices
from knowgate.errors import BadSetting, KnowgateError, ModelError, UnsupportedSignal
from knowgate.gates import GATES
from knowgate.gates.artifacts.drift import check_state_agreement
from knowgate.gates.fitted_gate import FittedGate
from knowgate.models.backend import allow_interruption
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.tools import SEARCH_TOOL, TOOL_CALL
from knowgate.types import (
    Arbiter,
    Gate,
    GateScores,
    Model,
    Neighbor,
    Prompt,
    Question,
    Reading,
    ServedModel,
    Signal,
    SignalRequest,
    ToolCallingModel,
)


@contextlib.contextmanager
def wrap_plugin_errors(plugin: Gate | Arbiter, kind: str = "gate") -> Iterator[None]:
    """Turn exceptions of a plugin into a ModelError with the plugin's name.

    Exceptions of knowgate itself stay unchanged.

    Args:
        plugin: The gate or arbiter that runs inside the `with` block.
        kind: What the error message calls it: "gate" or "arbiter".
    """
    try:
        yield
    except (KnowgateError, MemoryError):
        raise
    except Exception as error:
        is_plugin = type(plugin).__module__.split(".")[0] != "knowgate"
        if not is_plugin:
            raise
        raise _make_plugin_error(plugin, kind, error) from error


def _make_plugin_error(plugin: Gate | Arbiter, kind: str, error: Exception) -> ModelError:
    """Build the error that names a failed plugin, with the first line of its message."""
    cls = type(plugin)
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    return ModelError(
        f"{kind} '{plugin.name}' ({cls.__module__}.{cls.__qualname__}) failed: {type(error).__name__}: {first_line}"
        f". This {kind} is a plugin, not part of knowgate. Report the error to the plugin's author."
    )


# --- scores ---------------------------------------------------------------------------------------


def score_questions(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
    """Return the need for retrieval of each question, from 0 (known) to 1 (retrieve).

    Raises:
        ModelError: The gate did not return one number in [0, 1] per question.
    """
    return score_with_raw(gate, questions, readings).needs


def score_with_raw(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
    """Return the checked needs of all questions, and their scores before calibration.

    Gates that are not fitted have no scores before calibration.

    Raises:
        ModelError: The gate did not return one number in [0, 1] per question.
    """
    with wrap_plugin_errors(gate):
        scores = gate.score_with_raw(questions, readings)
    try:
        needs = [float(need) for need in scores.needs]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"gate '{gate.name}' did not return a list of numbers: {error}.") from error
    check_count(gate, "scores", needs, questions)
    _check_needs(gate, needs, questions)
    if scores.raw is not None:
        check_count(gate, "raw scores", scores.raw, questions)
    return GateScores(needs, scores.raw)


def _check_needs(gate: Gate, needs: Sequence[float], questions: Sequence[Question]) -> None:
    """Raise ModelError if a need for retrieval is not from 0 to 1."""
    for question, need in zip(questions, needs, strict=True):
        if not (math.isfinite(need) and 0 <= need <= 1):
            raise ModelError(
                f"gate '{gate.name}' returned the score {need} for '{question.text[:60]}'. Return a score from 0 (no "
                "retrieval) to 1 (retrieve).",
                brief=f"gate '{gate.name}' returned the score {need}, which is not from 0 to 1",
            )


def measure_distances(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
    """Return how far each question is from the training questions (above 1 is far).

    Returns:
        One distance per question; None if the gate cannot measure it.

    Raises:
        ModelError: The gate did not return one distance of at least 0, or None, per question.
    """
    with wrap_plugin_errors(gate):
        distances = gate.distances(questions, readings)
    check_count(gate, "distances", distances, questions)
    for question, distance in zip(questions, distances, strict=True):
        if distance is not None and not (isinstance(distance, (int, float)) and 0 <= distance < math.inf):
            raise ModelError(
                f"gate '{gate.name}' returned the distance {distance} for '{question.text[:60]}'. A distance must be a "
                "number of at least 0.",
                brief=f"gate '{gate.name}' returned the distance {distance}, which is not a number of at least 0",
            )
    return distances


def check_count(gate: Gate, what: str, values: Sequence[object], questions: Sequence[Question]) -> None:
    """Raise ModelError if a gate did not return one value per question. `what` describes the values."""
    if len(values) != len(questions):
        raise ModelError(
            f"gate '{gate.name}' returned {len(values)} {what} for {len(questions)} questions. It must return one per "
            "question."
        )


def copy_with_threshold(gate: Gate, threshold: float, name: str) -> Gate:
    """Return a copy of a gate that has a different threshold and name."""
    copied = copy.copy(gate)
    # Gates are frozen dataclasses whose threshold and name need not be fields, so `replace` does not work here.
    object.__setattr__(copied, "threshold", threshold)
    object.__setattr__(copied, "name", name)
    return copied


# --- signals --------------------------------------------------------------------------------------


def bind_gate(gate: Gate, model: Model, prompts: AnswerPrompts) -> Gate:
    """Return a copy of a gate for this model and these answer prompts.

    Raises:
        UnsupportedSignal: The model does not provide a signal that the gate needs.
        ArtifactError: The gate was fitted on a different model or different prompts.
    """
    check_model_signals(gate, model)
    with wrap_plugin_errors(gate):
        # The fingerprint of a server does not show which weights it runs, so its hidden states are compared instead.
        if isinstance(gate, FittedGate) and _may_serve_same_weights(gate, model, prompts):
            return _bind_by_hidden_states(gate, model, prompts)
        bound = gate.bind(model, prompts.fingerprint)
    check_read_request(bound, model)
    return bound


def _bind_by_hidden_states(gate: FittedGate, model: Model, prompts: AnswerPrompts) -> FittedGate:
    """Return a copy of a fitted gate for a server. The server must return the same hidden states as in training.

    Raises:
        ArtifactError: The hidden states differ.
    """
    bound = replace(gate, llm=model)
    check_read_request(bound, model)
    note = check_state_agreement(gate.artifact, model, prompts, bound.request)
    return replace(bound, note=note)


def _may_serve_same_weights(gate: FittedGate, model: Model, prompts: AnswerPrompts) -> bool:
    """Return whether a server might run the LLM that the gate was fitted on.

    The fingerprints do not tell, because a server never has the same fingerprint as local weights. A comparison of hidden
    states can tell, if the gate reads any.
    """
    if not isinstance(model, ServedModel) or gate.plug_in:
        return False
    fitted_on = gate.artifact.manifest
    is_other_model = fitted_on["model"]["fingerprint"] != model.fingerprint
    return is_other_model and fitted_on["prompts"] == prompts.fingerprint and bool(gate.request.layers)


FindNeighbors = Callable[[Gate, Sequence[Question]], list[tuple[Neighbor, ...]]]


def find_neighbors(gate: Gate, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
    """Return the logged questions that are similar to each question."""
    return gate.find_neighbors(questions)


def read_questions(
    model: Model,
    gates: Sequence[Gate],
    questions: Sequence[Question],
    prompts: AnswerPrompts,
    find: FindNeighbors = find_neighbors,
) -> list[Reading]:
    """Run a model on questions, and return one reading per question. A reading has the signals for all gates.

    Args:
        model: The model.
        gates: Gates that need the signals.
        questions: The questions.
        prompts: Prompts for answers.
        find: Searches similar logged questions for a gate.
    """
    requests = [gate.request for gate in gates]
    _check_sample_layers(gates, requests)
    if not questions:
        return []
    if all(request.is_empty for request in requests):
        readings = [Reading() for _ in questions]
    else:
        with allow_interruption(model):
            closed_prompts = [prompts.closed(question) for question in questions]
            readings = model.read(closed_prompts, functools.reduce(operator.or_, requests, SignalRequest()))
    for gate in gates:
        readings = add_neighbors(gate, questions, readings, find)
        readings = _add_label_logits(gate, model, questions, readings)
        readings = _add_tool_calls(gate, model, questions, readings)
    return readings


def _add_label_logits(
    gate: Gate, model: Model, questions: Sequence[Question], readings: list[Reading]
) -> list[Reading]:
    """Add the model's reply to the gate's own prompt, if the gate needs it."""
    if not needs_label_prompts(gate, readings):
        return readings
    with wrap_plugin_errors(gate):
        label_prompts = gate.build_label_prompts(questions, readings)
    with allow_interruption(model):
        logits = model.label_logits(label_prompts, gate.labels)
    return _add_to_field(readings, "labels", gate.name, logits)


def _add_tool_calls(gate: Gate, model: Model, questions: Sequence[Question], readings: list[Reading]) -> list[Reading]:
    """Add how probably the model calls a search tool, if the gate needs it."""
    if Signal.TOOLS not in gate.needs or all(TOOL_CALL in reading.signals for reading in readings):
        return readings
    if not isinstance(model, ToolCallingModel):
        raise UnsupportedSignal(
            f"{model.name} does not support tool calls. Use an hf:, gguf: or openai: model, or a gate without tool calls."
        )
    prompts = [Prompt(render_choices(question)) for question in questions]
    with allow_interruption(model):
        probabilities = model.tool_call_probabilities(prompts, SEARCH_TOOL)
    return _add_to_field(readings, "signals", TOOL_CALL, probabilities)


def add_neighbors(
    gate: Gate, questions: Sequence[Question], readings: list[Reading], find: FindNeighbors = find_neighbors
) -> list[Reading]:
    """Add similar logged questions to the readings, if the gate uses them."""
    if type(gate).find_neighbors is Gate.find_neighbors:  # the gate does not override the default, which finds none
        return readings
    with wrap_plugin_errors(gate):
        neighbors = find(gate, questions)
    return _add_to_field(readings, "neighbors", gate.name, neighbors)


def _add_to_field(readings: Sequence[Reading], field: str, key: str, values: Sequence[Any]) -> list[Reading]:
    """Return copies of readings with one more entry in a mapping.

    Args:
        readings: The readings.
        field: Name of the mapping, such as 'labels'.
        key: Key of the new entry.
        values: Value of the new entry for each reading.
    """
    copies = []
    for reading, value in zip(readings, values, strict=True):
        extended: Any = {**getattr(reading, field), key: value}
        copies.append(replace(reading, **{field: extended}))
    return copies


def count_own_calls(gate: Gate) -> int:
    """Return how many LLM calls a gate makes per question besides the draft, such as for samples."""
    has_own_prompt = bool({Signal.LABELS, Signal.TOOLS} & gate.needs)
    return has_own_prompt + gate.request.samples


def needs_label_prompts(gate: Gate, readings: Sequence[Reading]) -> bool:
    """Return whether the LLM must answer the gate's own prompt. Example: "Can you answer this? true/false".

    Raises:
        BadSetting: The gate has prompts, but does not define the labels to choose from.
    """
    if Signal.LABELS not in gate.needs:
        return False
    if all(gate.recorded_signal in reading.signals for reading in readings):
        return False
    if not gate.labels:
        raise BadSetting(
            f"gate '{gate.name}' needs the signal 'labels' but defines no labels. Define `labels` and "
            "`build_label_prompts` in its class."
        )
    return True


def _check_sample_layers(gates: Sequence[Gate], requests: Sequence[SignalRequest]) -> None:
    """Raise BadSetting if two gates read hidden states of sampled answers at different layers or tokens.

    One pass of the model returns only one hidden state per sampled answer.
    """
    ends = {(request.sample_layer, request.sample_end) for request in requests if request.sample_layer is not None}
    if len(ends) > 1:
        pairs = zip(gates, requests, strict=True)
        names = ", ".join(gate.name for gate, request in pairs if request.sample_layer is not None)
        raise BadSetting(
            f"these gates cannot run together: {names}. They read hidden states of sampled answers at different layers or "
            "tokens. Run one at a time, or set the same layer."
        )


def check_model_signals(gate: Gate, model: Model) -> None:
    """Raise UnsupportedSignal if a model lacks a signal of the gate."""
    missing = gate.needs - model.offers
    if missing:
        usable = [name for name, entry in GATES.items() if _parse_signals(entry) <= model.offers]
        raise UnsupportedSignal(
            f"gate '{gate.name}' needs {', '.join(sorted(missing))}, which {model.name} does not provide. Use a gate that "
            f"works with it: {', '.join(usable)}."
        )


def check_read_request(gate: Gate, model: Model) -> None:
    """Raise UnsupportedSignal if a server cannot return the signals of a gate. Local models always can."""
    if not isinstance(model, ServedModel):
        return
    try:
        model.check_request(gate.request)
    except UnsupportedSignal as error:
        raise UnsupportedSignal(f"gate '{gate.name}' does not work with {model.name}: {error}") from None


def _parse_signals(entry: RegistryEntry) -> set[Signal]:
    """Return the signals that a gate's registry entry lists, such as "hidden, samples"."""
    return {Signal(name.strip()) for name in entry.needs.split(",") if name.strip()}


def parse_label_pair(words: str, gate: str) -> tuple[str, str]:
    """Split an option such as 'true/false' into the labels for known and unknown.

    Args:
        words: The two labels with a slash between them.
        gate: Name of the gate for the error message.

    Raises:
        BadSetting: `words` does not contain two labels.
    """
    known, _, unknown = (label.strip() for label in words.partition("/"))
    if not (known and unknown):
        raise BadSetting(
            f"gate '{gate}': words='{words}' must be two words, for known and unknown, such as true/false."
        )
    return known, unknown
