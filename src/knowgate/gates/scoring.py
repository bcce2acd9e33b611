"""What a gate says, checked: as many numbers as questions, each of them usable. Others may say anything."""

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
from knowgate.errors import BadSetting, KnowgateError, ModelError, NotOffered
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
def wrap_plugin_errors(part: Gate | Arbiter, what: str = "gate") -> Iterator[None]:
    """Around every call of a part's own code."""
    try:
        yield
    except (KnowgateError, MemoryError):
        raise
    except Exception as error:
        kind = type(part)
        if kind.__module__.split(".")[0] == "knowgate":
            raise  # ours to mend
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{what} '{part.name}' ({kind.__module__}.{kind.__qualname__}) failed: {type(error).__name__}: {first}. "
            "It is not a part of knowgate: tell whoever wrote it."
        ) from error


def score_questions(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
    """The gate's needs, checked: one per question, each a number in [0, 1]."""
    return score_with_raw(gate, questions, readings).needs


def score_with_raw(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
    """Checked needs, with the raw scores of a fitted gate beside them."""
    with wrap_plugin_errors(gate):
        scored = gate.score_with_raw(questions, readings)
    try:
        needs = [float(need) for need in scored.needs]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"gate '{gate.name}' gave no list of numbers ({error}): `score` gives a need each.") from error
    check_count(gate, "needs", needs, questions)
    for question, need in zip(questions, needs, strict=True):
        if not (math.isfinite(need) and 0 <= need <= 1):
            raise ModelError(f"gate '{gate.name}' gave {need} for '{question.text[:60]}': not a number in [0, 1].")
    if scored.raw is not None:
        check_count(gate, "raw scores", scored.raw, questions)
    return GateScores(needs, scored.raw)


def measure_distances(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
    """How far the questions lie from those of the gate's fit, checked: one each, a number from 0 on or nothing."""
    with wrap_plugin_errors(gate):
        found = gate.distances(questions, readings)
    check_count(gate, "distances", found, questions)
    for question, distance in zip(questions, found, strict=True):
        if distance is not None and not (isinstance(distance, (int, float)) and 0 <= distance < math.inf):
            raise ModelError(f"gate '{gate.name}' gave the distance {distance} for '{question.text[:60]}': no number.")
    return found


def check_count(gate: Gate, what: str, given: Sequence[object], questions: Sequence[Question]) -> None:
    """A gate of another package may give too few or too many; nobody would know whose is whose."""
    if len(given) != len(questions):
        raise ModelError(f"gate '{gate.name}' gave {len(given)} {what} for {len(questions)} questions; one each.")


def check_model_signals(gate: Gate, model: Model) -> None:
    """Refuse a gate that needs what this backend cannot give, and name those that would work."""
    missing = gate.needs - model.offers
    if not missing:
        return
    works = [name for name, entry in GATES.items() if _signals(entry) <= model.offers]
    raise NotOffered(
        f"gate '{gate.name}' needs {', '.join(sorted(missing))}, which {model.name} does not give. "
        f"Give one that works with it to --gate: {', '.join(works)}."
    )


def check_read_request(gate: Gate, model: Model) -> None:
    """Refuse a gate, once it is bound, that reads what a server gives of other layers, places or tokens only."""
    if not isinstance(model, ServedModel):
        return
    try:
        model.check_request(gate.request)
    except NotOffered as error:
        raise NotOffered(f"gate '{gate.name}' cannot work with {model.name}: {error}") from None


def _signals(entry: RegistryEntry) -> set[Signal]:
    return {Signal(word.strip()) for word in entry.needs.split(",") if word.strip()}


class ReadingSource(Protocol):
    """Where readings come from: a model, or what was recorded of one."""

    def bind(self, gate: Gate) -> Gate:
        """The gate, ready for this LLM and wording; raises if it needs what is not to be had here."""
        ...

    def read(self, questions: Sequence[Question], want: SignalRequest) -> list[Reading]:
        """The one pass over the bare questions."""
        ...

    def ask(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """The logits of what the gate asks."""
        ...


def collect_readings(source: ReadingSource, gates: Sequence[Gate], questions: Sequence[Question]) -> list[Reading]:
    """Everything the gates need to score these questions."""
    _check_one_layer(gates)
    if not questions:
        return []
    readings = source.read(questions, functools.reduce(operator.or_, (gate.request for gate in gates), SignalRequest()))
    for gate in gates:
        if type(gate).find_neighbors is not Gate.find_neighbors:  # most look nothing up, and readings are many
            readings = _with_recalled(gate, questions, readings)
        if _must_ask(gate, readings):
            logits = source.ask(gate, questions, readings)
            readings = [
                replace(reading, labels={**reading.labels, gate.name: rows})
                for reading, rows in zip(readings, logits, strict=True)
            ]
    return readings


def _with_recalled(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Reading]:
    with wrap_plugin_errors(gate):
        recalled = gate.find_neighbors(questions)
    name = gate.name
    return [
        replace(reading, neighbors={**reading.neighbors, name: near})
        for reading, near in zip(readings, recalled, strict=True)
    ]


def _must_ask(gate: Gate, readings: Sequence[Reading]) -> bool:
    """Not where the answer is on record."""
    if Signal.LABELS not in gate.needs or all(gate.recorded_signal in reading.signals for reading in readings):
        return False
    if not gate.labels:
        raise BadSetting(f"gate '{gate.name}' needs labels but has none: give its class `labels` and `ask`.")
    return True


def _check_one_layer(gates: Sequence[Gate]) -> None:
    """A pass gives the end states of its samples at one layer and one place."""
    asked = [gate for gate in gates if gate.request.sample_layer is not None]
    if len({(gate.request.sample_layer, gate.request.sample_end) for gate in asked}) > 1:
        listed = ", ".join(f"{gate.name}: {gate.request.sample_layer}{_place(gate.request)}" for gate in asked)
        raise BadSetting(
            f"gates in one pass must read their samples at the same layer and place, not at several ({listed})."
        )


def _place(want: SignalRequest) -> str:
    return "" if want.sample_end else ", before the end token"


@dataclass(frozen=True)
class ModelReadingSource:
    """Readings from a model: one pass over the bare questions, another over what a gate asks."""

    model: Model
    prompts: AnswerPrompts

    def bind(self, gate: Gate) -> Gate:
        check_model_signals(gate, self.model)
        with wrap_plugin_errors(gate):
            bound = self._bound(gate)
        check_read_request(bound, self.model)
        return bound

    def _bound(self, gate: Gate) -> Gate:
        """A gate fitted on the states of weights that a server now serves is held against the server's own."""
        model, wording = self.model, self.prompts.fingerprint
        if not (isinstance(gate, FittedGate) and isinstance(model, ServedModel)) or gate.plug_in:
            return gate.bind(model, wording)
        made = gate.artifact.manifest
        is_other = made["model"]["fingerprint"] != model.fingerprint and made["prompts"] == wording
        if not (is_other and gate.request.layers):
            return gate.bind(model, wording)
        served = replace(gate, llm=model)
        check_read_request(served, model)
        return replace(served, note=check_state_agreement(gate.artifact, model, self.prompts, served.request))

    def read(self, questions: Sequence[Question], want: SignalRequest) -> list[Reading]:
        if want.is_empty:
            return [Reading() for _ in questions]
        return self.model.read([self.prompts.closed(question) for question in questions], want)

    def ask(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        with wrap_plugin_errors(gate):
            prompts = gate.build_label_prompts(questions, readings)
        return self.model.label_logits(prompts, gate.labels)


def bind_gate(gate: Gate, model: Model, prompts: AnswerPrompts) -> Gate:
    """The gate, found to work with this model and wording."""
    return ModelReadingSource(model, prompts).bind(gate)


def read_questions(
    model: Model, gates: Sequence[Gate], questions: Sequence[Question], prompts: AnswerPrompts
) -> list[Reading]:
    """What the gates need, from one pass over the bare questions and each asking gate's own prompt."""
    return collect_readings(ModelReadingSource(model, prompts), gates, questions)


def copy_with_threshold(gate: Gate, threshold: float, name: str) -> Gate:
    """A copy that tables call `name`; the gate given stays as it is."""
    held = copy.copy(gate)
    object.__setattr__(held, "threshold", threshold)  # gates are frozen; both may be plain attributes of one
    object.__setattr__(held, "name", name)
    return held
