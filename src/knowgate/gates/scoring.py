"""Run gates on questions: read the signals they need from a model in one pass, and check their scores.

Gates may be plugins, so everything they return is checked and their errors name them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from knowgate.core.registry import RegistryEntry
from knowgate.errors import BadSetting, KnowgateError, ModelError, UnsupportedSignal
from knowgate.gates import GATES
from knowgate.gates.artifacts.drift import check_state_agreement
from knowgate.gates.fitted_gate import FittedGate
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import (
    Arbiter,
    Gate,
    GateScores,
    Model,
    Question,
    Reading,
    ServedModel,
    Signal,
    SignalRequest,
    Vector,
)


@contextlib.contextmanager
def wrap_plugin_errors(plugin: Gate | Arbiter, kind: str = "gate") -> Iterator[None]:
    """Convert exceptions of a plugin's code into a ModelError that names the plugin."""
    try:
        yield
    except (KnowgateError, MemoryError):
        raise
    except Exception as error:
        cls = type(plugin)
        if cls.__module__.split(".")[0] == "knowgate":
            raise
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{kind} '{plugin.name}' ({cls.__module__}.{cls.__qualname__}) failed: {type(error).__name__}: {first_line}"
            ". It is not part of knowgate: report this to its author."
        ) from error


# --- scores ---------------------------------------------------------------------------------------


def score_questions(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
    """Return the needs of a gate, after checking that there is one number in [0, 1] per question."""
    return score_with_raw(gate, questions, readings).needs


def score_with_raw(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
    """Return the checked needs of a gate, with the raw scores of a fitted gate.

    Raises:
        ModelError: The gate did not return one number in [0, 1] per question.
    """
    with wrap_plugin_errors(gate):
        scores = gate.score_with_raw(questions, readings)
    try:
        needs = [float(need) for need in scores.needs]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"gate '{gate.name}' did not return a list of numbers ({error}).") from error
    check_count(gate, "needs", needs, questions)
    for question, need in zip(questions, needs, strict=True):
        if not (math.isfinite(need) and 0 <= need <= 1):
            raise ModelError(f"gate '{gate.name}' gave {need} for '{question.text[:60]}': not a number in [0, 1].")
    if scores.raw is not None:
        check_count(gate, "raw scores", scores.raw, questions)
    return GateScores(needs, scores.raw)


def measure_distances(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
    """Return the checked distances of questions from the training questions; None if the gate does not know."""
    with wrap_plugin_errors(gate):
        distances = gate.distances(questions, readings)
    check_count(gate, "distances", distances, questions)
    for question, distance in zip(questions, distances, strict=True):
        if distance is not None and not (isinstance(distance, (int, float)) and 0 <= distance < math.inf):
            raise ModelError(
                f"gate '{gate.name}' gave the distance {distance} for '{question.text[:60]}': not a number from 0."
            )
    return distances


def check_count(gate: Gate, what: str, values: Sequence[object], questions: Sequence[Question]) -> None:
    """Raise ModelError if a gate did not return one value per question."""
    if len(values) != len(questions):
        raise ModelError(f"gate '{gate.name}' gave {len(values)} {what} for {len(questions)} questions.")


def copy_with_threshold(gate: Gate, threshold: float, name: str) -> Gate:
    """Copy a gate with another threshold and name."""
    copied = copy.copy(gate)
    object.__setattr__(copied, "threshold", threshold)  # gates are frozen, and both may be plain attributes
    object.__setattr__(copied, "name", name)
    return copied


# --- signals --------------------------------------------------------------------------------------


class ReadingSource(Protocol):
    """Where readings come from: a model, or a label table."""

    def bind(self, gate: Gate) -> Gate:
        """Bind a gate to the LLM and the prompts; raises if it needs signals that are not available."""
        ...

    def read(self, questions: Sequence[Question], request: SignalRequest) -> list[Reading]:
        """Read the signals of one pass over the bare questions."""
        ...

    def read_labels(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """Return the label logits of the gate's own prompts."""
        ...


@dataclass(frozen=True)
class ModelReadingSource:
    """Reads signals from a model: one pass over the bare questions, and one over each gate's own prompts."""

    model: Model
    prompts: AnswerPrompts

    def bind(self, gate: Gate) -> Gate:
        """Bind a gate to the model, after checking that the model provides its signals."""
        check_model_signals(gate, self.model)
        with wrap_plugin_errors(gate):
            bound = self._bind(gate)
        check_read_request(bound, self.model)
        return bound

    def _bind(self, gate: Gate) -> Gate:
        """Bind the gate; if it was fitted on weights that a server now serves, compare their hidden states."""
        model, prompts = self.model, self.prompts.fingerprint
        if not (isinstance(gate, FittedGate) and isinstance(model, ServedModel)) or gate.plug_in:
            return gate.bind(model, prompts)
        manifest = gate.artifact.manifest
        has_other_model = manifest["model"]["fingerprint"] != model.fingerprint and manifest["prompts"] == prompts
        if not (has_other_model and gate.request.layers):
            return gate.bind(model, prompts)
        served = replace(gate, llm=model)
        check_read_request(served, model)
        return replace(served, note=check_state_agreement(gate.artifact, model, self.prompts, served.request))

    def read(self, questions: Sequence[Question], request: SignalRequest) -> list[Reading]:
        """Read the signals of one pass; an empty request runs no model."""
        if request.is_empty:
            return [Reading() for _ in questions]
        return self.model.read([self.prompts.closed(question) for question in questions], request)

    def read_labels(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """Run the gate's own prompts and return the label logits."""
        with wrap_plugin_errors(gate):
            prompts = gate.build_label_prompts(questions, readings)
        return self.model.label_logits(prompts, gate.labels)


def bind_gate(gate: Gate, model: Model, prompts: AnswerPrompts) -> Gate:
    """Bind a gate to a model and its answer prompts, after checking that they work together."""
    return ModelReadingSource(model, prompts).bind(gate)


def read_questions(
    model: Model, gates: Sequence[Gate], questions: Sequence[Question], prompts: AnswerPrompts
) -> list[Reading]:
    """Read everything that the gates need from a model."""
    return collect_readings(ModelReadingSource(model, prompts), gates, questions)


def collect_readings(source: ReadingSource, gates: Sequence[Gate], questions: Sequence[Question]) -> list[Reading]:
    """Read everything that the gates need, with their requests merged into one pass."""
    _check_sample_layers(gates)
    if not questions:
        return []
    readings = source.read(questions, functools.reduce(operator.or_, (gate.request for gate in gates), SignalRequest()))
    for gate in gates:
        if type(gate).find_neighbors is not Gate.find_neighbors:  # most gates have none, and copying readings is slow
            with wrap_plugin_errors(gate):
                neighbors = gate.find_neighbors(questions)
            readings = [
                replace(reading, neighbors={**reading.neighbors, gate.name: items})
                for reading, items in zip(readings, neighbors, strict=True)
            ]
        if _needs_label_prompts(gate, readings):
            logits = source.read_labels(gate, questions, readings)
            readings = [
                replace(reading, labels={**reading.labels, gate.name: rows})
                for reading, rows in zip(readings, logits, strict=True)
            ]
    return readings


def _needs_label_prompts(gate: Gate, readings: Sequence[Reading]) -> bool:
    """Return whether the LLM must be asked the gate's own prompts, because the answers are not recorded."""
    if Signal.LABELS not in gate.needs or all(gate.recorded_signal in reading.signals for reading in readings):
        return False
    if not gate.labels:
        raise BadSetting(
            f"gate '{gate.name}' needs labels but defines none: define `labels` and `build_label_prompts`."
        )
    return True


def _check_sample_layers(gates: Sequence[Gate]) -> None:
    """Raise BadSetting if gates read their samples at different layers or tokens, because a pass reads one."""
    requests = [(gate.name, gate.request) for gate in gates if gate.request.sample_layer is not None]
    if len({(request.sample_layer, request.sample_end) for _, request in requests}) > 1:
        listed = ", ".join(
            f"{name}: {request.sample_layer}{'' if request.sample_end else ', before the end token'}"
            for name, request in requests
        )
        raise BadSetting(f"gates in one pass must read their samples at the same layer and token, not at {listed}.")


def check_model_signals(gate: Gate, model: Model) -> None:
    """Raise UnsupportedSignal if a gate needs signals that a model does not provide; the message names gates that work."""
    missing = gate.needs - model.offers
    if missing:
        usable = [name for name, entry in GATES.items() if _parse_signals(entry) <= model.offers]
        raise UnsupportedSignal(
            f"gate '{gate.name}' needs {', '.join(sorted(missing))}, which {model.name} does not provide. Gates that "
            f"work with it: {', '.join(usable)}."
        )


def check_read_request(gate: Gate, model: Model) -> None:
    """Raise UnsupportedSignal if a server does not return the layers, positions or tokens that a bound gate reads."""
    if not isinstance(model, ServedModel):
        return
    try:
        model.check_request(gate.request)
    except UnsupportedSignal as error:
        raise UnsupportedSignal(f"gate '{gate.name}' does not work with {model.name}: {error}") from None


def _parse_signals(entry: RegistryEntry) -> set[Signal]:
    """Parse the signals that a registry entry lists."""
    return {Signal(name.strip()) for name in entry.needs.split(",") if name.strip()}
