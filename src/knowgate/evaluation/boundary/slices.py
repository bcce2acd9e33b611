"""The same few numbers for parts of a run: by data set, language, freshness, hops, answer frequency and form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knowgate.evaluation.boundary.facts import Fact
from knowgate.statistics import Share, mean, share

DIMENSIONS = ("data set", "language", "freshness", "hops", "answer frequency", "form")
NOT_GIVEN = "(not given)"
TERCILES = ("rare", "middle", "frequent")


@dataclass(frozen=True)
class Slice:
    """Part of a run; n is 0 for a part that exists by name only. Means are over the questions that have the value."""

    dimension: str
    value: str
    n: int
    closed: Share
    open: Share
    benefit: float | None
    mastery: float | None
    certainty: float | None


def slices(facts: Sequence[Fact]) -> tuple[Slice, ...]:
    """Every dimension this run's data say something about. Those with one value matter only beside other runs."""
    found: list[Slice] = []
    for dimension in DIMENSIONS:
        groups = _terciles(facts) if dimension == "answer frequency" else _groups(facts, dimension)
        if set(groups) - {NOT_GIVEN}:
            found += [summarise(dimension, value, part) for value, part in groups.items()]
    return tuple(found)


def summarise(dimension: str, value: str, facts: Sequence[Fact]) -> Slice:
    return Slice(
        dimension,
        value,
        n=len(facts),
        closed=share(fact.closed for fact in facts),
        open=share(fact.open for fact in facts),
        benefit=mean(fact.benefit for fact in facts),
        mastery=mean(fact.indicators["mastery"] for fact in facts),
        certainty=mean(fact.indicators["certainty"] for fact in facts),
    )


def _groups(facts: Sequence[Fact], dimension: str) -> Mapping[str, list[Fact]]:
    """By value, in alphabetical order; questions without one come last."""
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.slices.get(dimension, NOT_GIVEN), []).append(fact)
    names = sorted(groups, key=lambda name: (name == NOT_GIVEN, name))
    return {name: groups[name] for name in names}


def _terciles(facts: Sequence[Fact]) -> Mapping[str, list[Fact]]:
    """Thirds by how many passages hold the answer. Equal counts stay together, so a third can be empty."""
    known = sorted(fact.frequency for fact in facts if fact.frequency is not None)
    if len(set(known)) < 2:
        return {}
    n = len(known)
    low, high = known[math.ceil(n / 3) - 1], known[math.ceil(2 * n / 3) - 1]
    groups: dict[str, list[Fact]] = {name: [] for name in (*TERCILES, NOT_GIVEN)}
    for fact in facts:
        groups[_tercile(fact.frequency, low, high)].append(fact)
    return {name: part for name, part in groups.items() if part or name != NOT_GIVEN}


def _tercile(frequency: int | None, low: int, high: int) -> str:
    if frequency is None:
        return NOT_GIVEN
    return TERCILES[(frequency > low) + (frequency > high)]
