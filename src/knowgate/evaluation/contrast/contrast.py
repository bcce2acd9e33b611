"""Differences between two evaluations, gate by gate, with intervals: paired where the questions are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.contrast.side import BEHIND, RECOMMENDED, GateSide, Side
from knowgate.statistics import RESAMPLES, Bools, Estimate, Floats, estimate_means

FEWEST = 30  # questions that two sides must share to be paired
USUAL = ("never", "always", RECOMMENDED)


@dataclass(frozen=True)
class Change:
    """A measure on both sides, and the second less the first."""

    first: Estimate
    second: Estimate
    difference: Estimate


@dataclass(frozen=True)
class GateContrast:
    """One gate on both sides, by measure: accuracy, rate (of searches), auroc."""

    gate: str
    changes: dict[str, Change]


@dataclass(frozen=True)
class Contrast:
    """paired: on how many questions that both sides share; 0 where they share too few. watched: gates that count.

    shared: how many questions both sides have. needed: how many it takes to compare them in pairs.
    """

    first: Side
    second: Side
    gates: list[GateContrast]
    watched: list[str]
    paired: int = 0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shared: int = 0
    needed: int = 0

    def worse_by(self, tolerated: float) -> list[GateContrast]:
        """Watched gates whose accuracy fell by more than that, and for certain: the interval lies below 0."""
        return [
            one
            for one in self.gates
            if one.gate in self.watched and (change := one.changes.get("accuracy")) and _fell(change, tolerated)
        ]


def _fell(change: Change, tolerated: float) -> bool:
    found = change.difference
    return found.value is not None and found.value < -tolerated and found.high is not None and found.high < 0


def hold_against(first: Side, second: Side, watch: Sequence[str] = (), resamples: int = RESAMPLES) -> Contrast:
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
    usual = [gate for gate in shared if gate in USUAL or gate.endswith(BEHIND)]
    named = [gate for gate in shared if gate in watch or gate.removesuffix(BEHIND) in watch]
    return Contrast(
        first, second, gates, named or usual, len(pairs[0]),
        [gate for gate in first.gates if gate not in shared], [gate for gate in second.gates if gate not in shared],
        len(both[0]), needed,
    )  # fmt: skip


def contrast_json(found: Contrast) -> dict[str, Any]:
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


Places = tuple[list[int], list[int]]


def _shared(first: Side, second: Side) -> Places:
    """Places of the questions that both sides have, each once."""
    here, there = _places(first), _places(second)
    both = [key for key in here if key in there]
    return [here[key] for key in both], [there[key] for key in both]


def _places(side: Side) -> dict[str, int]:
    """Each question's first place."""
    return {key: place for place, key in reversed(list(enumerate(side.keys)))}


def _needed(first: Side, second: Side) -> int:
    """Questions to share before differences are paired: some, and half of the smaller side."""
    return max(FEWEST, math.ceil(min(len(set(first.keys)), len(set(second.keys))) / 2))


def _gate(name: str, first: GateSide, second: GateSide, pairs: Places, resamples: int) -> GateContrast:
    changes = {
        measure: _apart(first.measures[measure], second.measures[measure])
        for measure in first.measures
        if measure in second.measures
    }
    for measure, kind in (("accuracy", "right"), ("rate", "searched")):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        if measure in changes and pairs[0] and ours is not None and theirs is not None:
            changes[measure] = _paired(ours[pairs[0]], theirs[pairs[1]], resamples)
    return GateContrast(name, changes)


def _paired(first: Bools, second: Bools, resamples: int) -> Change:
    ours, theirs = first.astype(float), second.astype(float)
    columns: list[Floats] = [ours, theirs, theirs - ours]
    return Change(*estimate_means(columns, resamples))


def _apart(first: Estimate, second: Estimate) -> Change:
    """Of independent questions: the variances add up. Half of an interval stands for 1.96 standard errors."""
    if first.value is None or second.value is None:
        return Change(first, second, Estimate(None))
    value = second.value - first.value
    halves = [_half(one) for one in (first, second)]
    if any(math.isnan(half) for half in halves):
        return Change(first, second, Estimate(value))
    half = math.hypot(*halves)
    return Change(first, second, Estimate(value, value - half, value + half))


def _half(found: Estimate) -> float:
    return math.nan if found.low is None or found.high is None else (found.high - found.low) / 2
