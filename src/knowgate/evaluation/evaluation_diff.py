"""Differences between two evaluations, gate by gate, with intervals: paired where the questions are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.evaluation_summary import ARBITER_SUFFIX, RECOMMENDED, EvaluationSummary, GateSummary
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Estimate, estimate_means
from knowgate.stats.metrics import BoolArray, FloatArray

MIN_SHARED_QUESTIONS = 30  # questions that two sides must share to be paired
DEFAULT_WATCHED = ("never", "always", RECOMMENDED)


@dataclass(frozen=True)
class MeasureDiff:
    """A measure on both sides, and the second less the first."""

    first: Estimate
    second: Estimate
    difference: Estimate


@dataclass(frozen=True)
class GateDiff:
    """One gate on both sides, by measure: accuracy, rate (of searches), auroc."""

    gate: str
    changes: dict[str, MeasureDiff]


@dataclass(frozen=True)
class EvaluationDiff:
    """paired: on how many questions that both sides share; 0 where they share too few. watched: gates that count.

    shared: how many questions both sides have. needed: how many it takes to compare them in pairs.
    """

    first: EvaluationSummary
    second: EvaluationSummary
    gates: list[GateDiff]
    watched: list[str]
    paired: int = 0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shared: int = 0
    needed: int = 0

    def worse_by(self, tolerated: float) -> list[GateDiff]:
        """Watched gates whose accuracy fell by more than that, and for certain: the interval lies below 0."""
        return [
            one
            for one in self.gates
            if one.gate in self.watched and (change := one.changes.get("accuracy")) and _fell(change, tolerated)
        ]


def _fell(change: MeasureDiff, tolerated: float) -> bool:
    found = change.difference
    return found.value is not None and found.value < -tolerated and found.high is not None and found.high < 0


def diff_evaluations(
    first: EvaluationSummary, second: EvaluationSummary, watch: Sequence[str] = (), resamples: int = DEFAULT_RESAMPLES
) -> EvaluationDiff:
    """watch: gates that count; without any, never, always, what each side recommends, all with an arbiter behind."""
    shared = [gate for gate in first.gates if gate in second.gates]
    if not shared:
        raise BadInput(
            f"'{first.name}' and '{second.name}' have no gate in common, so there is nothing to compare. "
            "Evaluate both with the same --gates."
        )
    for gate in watch:
        if gate not in shared:
            raise UnknownName("gate of both sides", gate, shared)
    both, needed = _shared(first, second), _needed(first, second)
    pairs = both if len(both[0]) >= needed else ([], [])
    gates = [_gate(gate, first.gates[gate], second.gates[gate], pairs, resamples) for gate in shared]
    usual = [gate for gate in shared if gate in DEFAULT_WATCHED or gate.endswith(ARBITER_SUFFIX)]
    named = [gate for gate in shared if gate in watch or gate.removesuffix(ARBITER_SUFFIX) in watch]
    return EvaluationDiff(
        first, second, gates, named or usual, len(pairs[0]),
        [gate for gate in first.gates if gate not in shared], [gate for gate in second.gates if gate not in shared],
        len(both[0]), needed,
    )  # fmt: skip


def diff_to_dict(found: EvaluationDiff) -> dict[str, Any]:
    """Every difference as plain data."""
    sides = {
        name: {"name": side.name, "model": side.model, "questions": side.n, "recommended": side.recommended}
        for name, side in (("first", found.first), ("second", found.second))
    }
    return {
        **sides,
        "paired": found.paired,
        "shared": found.shared,
        "needed": found.needed,
        "watched": found.watched,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "gates": [asdict(one) for one in found.gates],
    }


IndexPairs = tuple[list[int], list[int]]


def _shared(first: EvaluationSummary, second: EvaluationSummary) -> IndexPairs:
    """Places of the questions that both sides have, each once."""
    here, there = _places(first), _places(second)
    both = [key for key in here if key in there]
    return [here[key] for key in both], [there[key] for key in both]


def _places(side: EvaluationSummary) -> dict[str, int]:
    """Each question's first place."""
    return {key: place for place, key in reversed(list(enumerate(side.keys)))}


def _needed(first: EvaluationSummary, second: EvaluationSummary) -> int:
    """Questions to share before differences are paired: some, and half of the smaller side."""
    return max(MIN_SHARED_QUESTIONS, math.ceil(min(len(set(first.keys)), len(set(second.keys))) / 2))


def _gate(name: str, first: GateSummary, second: GateSummary, pairs: IndexPairs, resamples: int) -> GateDiff:
    changes = {
        measure: _apart(first.measures[measure], second.measures[measure])
        for measure in first.measures
        if measure in second.measures
    }
    for measure, kind in (("accuracy", "right"), ("rate", "searched")):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        if measure in changes and pairs[0] and ours is not None and theirs is not None:
            changes[measure] = _paired(ours[pairs[0]], theirs[pairs[1]], resamples)
    return GateDiff(name, changes)


def _paired(first: BoolArray, second: BoolArray, resamples: int) -> MeasureDiff:
    ours, theirs = first.astype(float), second.astype(float)
    columns: list[FloatArray] = [ours, theirs, theirs - ours]
    return MeasureDiff(*estimate_means(columns, resamples))


def _apart(first: Estimate, second: Estimate) -> MeasureDiff:
    """Of independent questions: the variances add up. Half of an interval stands for 1.96 standard errors."""
    if first.value is None or second.value is None:
        return MeasureDiff(first, second, Estimate(None))
    value = second.value - first.value
    halves = [_half(one) for one in (first, second)]
    if any(math.isnan(half) for half in halves):
        return MeasureDiff(first, second, Estimate(value))
    half = math.hypot(*halves)
    return MeasureDiff(first, second, Estimate(value, value - half, value + half))


def _half(found: Estimate) -> float:
    return math.nan if found.low is None or found.high is None else (found.high - found.low) / 2
