"""Proportions with intervals, agreement of graders, correlation, and paired tests of proportions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.errors import MissingExtra
from knowgate.stats.metrics import BoolArray

Z_95 = 1.959963984540054  # normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Proportion:
    """`hits` of `n` with its 95 % Wilson interval; the value is None if n is 0."""

    hits: int
    n: int
    value: float | None
    low: float | None
    high: float | None


def estimate_proportion(outcomes: Iterable[bool | None]) -> Proportion:
    """Estimate the share of True among the outcomes that are not None."""
    known = [outcome for outcome in outcomes if outcome is not None]
    hits, n = sum(known), len(known)
    if not n:
        return Proportion(0, 0, None, None, None)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927), which is valid for small n too."""
    p, z2 = hits / n, Z_95 * Z_95
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half_width = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of n pairs; `r` is None if one side is constant or there are fewer than two pairs."""

    n: int
    r: float | None


def pearson_correlation(first: Sequence[float], second: Sequence[float]) -> Correlation:
    """Return Pearson's correlation of paired values."""
    n = len(first)
    if len(set(first)) < 2 or len(set(second)) < 2:
        return Correlation(n, None)
    return Correlation(n, statistics.correlation(first, second))


@dataclass(frozen=True)
class GraderAgreement:
    """How often two graders agree.

    Attributes:
        side: Which answers were graded: 'closed', 'open' or 'both'.
        first: Name of the first grader.
        second: Name of the second grader.
        n: Number of answers.
        agree: Share of answers on which they agree.
        kappa: Cohen's kappa.
        only_first: Answers that only the first grader accepts.
        only_second: Answers that only the second grader accepts.
    """

    side: str
    first: str
    second: str
    n: int
    agree: float
    kappa: float | None
    only_first: int
    only_second: int


def measure_agreement(side: str, names: tuple[str, str], pairs: Sequence[tuple[bool, bool]]) -> GraderAgreement:
    """Measure the agreement of two graders from pairs of their verdicts."""
    n = len(pairs)
    if not n:
        return GraderAgreement(side, *names, 0, 0.0, None, 0, 0)
    agree = sum(a == b for a, b in pairs) / n
    only = [sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)]
    return GraderAgreement(side, *names, n, agree, cohens_kappa(pairs), *only)


def cohens_kappa(pairs: Sequence[tuple[bool, bool]]) -> float | None:
    """Return the agreement beyond chance (Cohen 1960); None without pairs, or if chance alone gives full agreement."""
    n = len(pairs)
    if not n:
        return None
    agree = sum(a == b for a, b in pairs) / n
    first, second = (sum(column) / n for column in zip(*pairs, strict=True))
    chance = first * second + (1 - first) * (1 - second)
    return None if math.isclose(chance, 1) else (agree - chance) / (1 - chance)


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a gate with another one on the same questions.

    Attributes:
        gate: Name of the gate.
        against: Name of the other one.
        difference: Difference of their accuracies, with the interval [low, high].
        low: Lower end of the interval.
        high: Upper end of the interval.
        p_bootstrap: Bootstrap p-value.
        p_mcnemar: p-value of McNemar's test.
        only_gate: Questions that only the gate has right.
        only_against: Questions that only the other one has right.
        p_holm: McNemar's p-value after Holm's correction over all comparisons of the table.
    """

    gate: str
    against: str
    difference: float
    low: float
    high: float
    p_bootstrap: float
    p_mcnemar: float
    only_gate: int
    only_against: int
    p_holm: float = 1.0


def mcnemar_test(first: BoolArray, second: BoolArray) -> tuple[float, int, int]:
    """Run the exact two-sided McNemar test.

    Returns:
        The p-value, the number of questions that only the first has right, and that only the second has right.
    """
    try:
        from scipy.stats import binomtest
    except ModuleNotFoundError:
        raise MissingExtra("comparing gates", "train") from None
    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    n = only_first + only_second
    return (float(binomtest(only_first, n, 0.5).pvalue) if n else 1.0), only_first, only_second


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, p_values[number] * (len(p_values) - rank)))
        corrected[number] = highest
    return corrected
