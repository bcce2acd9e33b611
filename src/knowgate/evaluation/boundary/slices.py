"""The same few numbers for parts of a run: by data set, language, freshness, hops, answer frequency and form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knowgate.evaluation.boundary.facts import Fact
from knowgate.runs import DIMENSIONS, FREQUENCY, THIRDS, frequency_thirds
from knowgate.statistics import Share, mean, share

NOT_GIVEN = "(not given)"


@dataclass(frozen=True)
class Slice:
    """Part of a run; n is 0 for a part that exists by name only. Means are over the questions that have the value.

    closed: over the questions of `open`, so that both can be compared; over all where none was answered with passages.
    """

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
    parts: list[Slice] = []
    for dimension in DIMENSIONS:
        groups = _thirds(facts) if dimension == FREQUENCY else _groups(facts, dimension)
        if set(groups) - {NOT_GIVEN}:
            parts += [summarise(dimension, value, part) for value, part in groups.items()]
    return tuple(parts)


def summarise(dimension: str, value: str, facts: Sequence[Fact]) -> Slice:
    matched = [fact for fact in facts if fact.open is not None] or facts
    return Slice(
        dimension,
        value,
        n=len(facts),
        closed=share(fact.closed for fact in matched),
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


def _thirds(facts: Sequence[Fact]) -> Mapping[str, list[Fact]]:
    """All three by name, a third that nothing fell into as well."""
    thirds = frequency_thirds([fact.frequency for fact in facts])
    if not any(thirds):
        return {}
    groups: dict[str, list[Fact]] = {name: [] for name in (*THIRDS, NOT_GIVEN)}
    for fact, third in zip(facts, thirds, strict=True):
        groups[third or NOT_GIVEN].append(fact)
    return {name: part for name, part in groups.items() if part or name != NOT_GIVEN}
