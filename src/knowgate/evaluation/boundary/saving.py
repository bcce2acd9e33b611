"""What skipping retrieval would save and cost: the answers are all there, so every threshold can be tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.evaluation.boundary.facts import CLOSE, Fact

MARKS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Point:
    """Retrieval is skipped where the indicator is at least the threshold (None: never skipped).

    saved: share of questions skipped. accuracy: closed-book answers where skipped, open-book ones elsewhere.
    random: the accuracy of skipping as many questions at random.
    """

    threshold: float | None
    saved: float
    accuracy: float
    random: float


@dataclass(frozen=True)
class Saving:
    """points: every distinct threshold, from skipping nothing to skipping all. marks: the thresholds of the table."""

    n: int
    always: float
    never: float
    points: tuple[Point, ...]
    marks: tuple[Point, ...]


def saving(facts: Sequence[Fact], indicator: str) -> Saving | None:
    """Over the questions with the indicator and both answers graded; None when there is none."""
    cases = _cases(facts, indicator)
    if not cases:
        return None
    n = len(cases)
    always = sum(opened for _, _, opened in cases) / n
    never = sum(closed for _, closed, _ in cases) / n
    right = list(itertools.accumulate((c - o for _, c, o in cases), initial=sum(o for _, _, o in cases)))

    def point(threshold: float | None, skipped: int) -> Point:
        saved = skipped / n
        return Point(threshold, saved, right[skipped] / n, saved * never + (1 - saved) * always)

    borders = [number + 1 for number in range(n) if number + 1 == n or cases[number][0] - cases[number + 1][0] > CLOSE]
    points = [point(None, 0), *(point(cases[border - 1][0], border) for border in borders)]
    marks = [point(mark, sum(value >= mark - CLOSE for value, _, _ in cases)) for mark in MARKS]
    return Saving(n, always, never, tuple(points), tuple(marks))


def _cases(facts: Sequence[Fact], indicator: str) -> list[tuple[float, bool, bool]]:
    """(indicator, closed right, open right), the highest indicator first."""
    cases = [
        (value, fact.closed, fact.open)
        for fact in facts
        if (value := fact.indicators[indicator]) is not None and fact.closed is not None and fact.open is not None
    ]
    return sorted(cases, key=lambda case: -case[0])
