"""Shares with intervals, correlation, agreement. Pure functions of numbers; None where a value is not defined."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.errors import MissingExtra
from knowgate.stats.metrics import BoolArray

Z_95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Proportion:
    """hits of n with its 95 % interval (Wilson 1927); no value when n is 0."""

    hits: int
    n: int
    value: float | None
    low: float | None
    high: float | None


def estimate_proportion(verdicts: Iterable[bool | None]) -> Proportion:
    """The share of True among the verdicts that are known."""
    known = [verdict for verdict in verdicts if verdict is not None]
    hits, n = sum(known), len(known)
    if not n:
        return Proportion(0, 0, None, None, None)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Score interval of a proportion: stays inside [0, 1] and is honest for small n."""
    p, z2 = hits / n, Z_95 * Z_95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Correlation:
    """Pearson's r; None when there are fewer than two pairs or one side is constant."""

    n: int
    r: float | None


def pearson_correlation(first: Sequence[float], second: Sequence[float]) -> Correlation:
    n = len(first)
    if len(set(first)) < 2 or len(set(second)) < 2:
        return Correlation(n, None)
    return Correlation(n, statistics.correlation(first, second))


@dataclass(frozen=True)
class GraderAgreement:
    """How far two graders agree on n answers; kappa: Cohen's. side: whose answers, closed, open or both."""

    side: str
    first: str
    second: str
    n: int
    agree: float
    kappa: float | None
    only_first: int
    only_second: int


def measure_agreement(side: str, names: tuple[str, str], pairs: Sequence[tuple[bool, bool]]) -> GraderAgreement:
    """Agreement over pairs (verdict of the first, verdict of the second)."""
    n = len(pairs)
    if not n:
        return GraderAgreement(side, *names, 0, 0.0, None, 0, 0)
    agree = sum(a == b for a, b in pairs) / n
    only = [sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)]
    return GraderAgreement(side, *names, n, agree, cohens_kappa(pairs), *only)


def cohens_kappa(pairs: Sequence[tuple[bool, bool]]) -> float | None:
    """Agreement beyond chance (Cohen 1960); None where chance alone gives full agreement, and without pairs."""
    n = len(pairs)
    if not n:
        return None
    agree = sum(a == b for a, b in pairs) / n
    first, second = (sum(column) / n for column in zip(*pairs, strict=True))
    chance = first * second + (1 - first) * (1 - second)
    return None if math.isclose(chance, 1) else (agree - chance) / (1 - chance)


@dataclass(frozen=True)
class PairedComparison:
    """Gate against another: difference of accuracy with its interval, two p-values, and those after Holm."""

    gate: str
    against: str
    difference: float
    low: float
    high: float
    p_bootstrap: float
    p_mcnemar: float
    only_gate: int
    only_against: int
    p_holm: float = 1.0  # of McNemar's, over all comparisons of the table


def mcnemar_test(first: BoolArray, second: BoolArray) -> tuple[float, int, int]:
    """Exact two-sided McNemar test: p-value, questions only the first has right, only the second."""
    try:
        from scipy.stats import binomtest
    except ModuleNotFoundError:
        raise MissingExtra("comparing gates", "train") from None
    a, b = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    return (float(binomtest(a, a + b, 0.5).pvalue) if a + b else 1.0), a, b


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest p-value times the number of tests not yet decided."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, p_values[number] * (len(p_values) - rank)))
        corrected[number] = highest
    return corrected
