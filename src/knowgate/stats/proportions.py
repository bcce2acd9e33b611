"""Confidence intervals of proportions, and their text for tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.display import MISSING_VALUE, format_percent, format_points
from knowgate.errors import require_extra
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.metrics import BoolArray

Z_95 = 1.959963984540054  # normal quantile of a two-sided 95 % interval
BISECTION_STEPS = 50


@dataclass(frozen=True)
class Proportion:
    """Proportion with its 95 % Wilson confidence interval.

    Attributes:
        hits: Number of hits, that is, cases with the counted property.
        n: Number of all cases.
        value: hits / n; None if n is 0.
        low: Lower end of the interval; None if n is 0.
        high: Upper end of the interval; None if n is 0.
    """

    hits: int
    n: int
    value: float | None
    low: float | None
    high: float | None


def estimate_proportion(outcomes: Iterable[bool | None]) -> Proportion:
    """Estimate the share of True among the outcomes. None is ignored."""
    known = [outcome for outcome in outcomes if outcome is not None]
    hits, n = sum(known), len(known)
    if not n:
        return Proportion(0, 0, None, None, None)
    return Proportion(hits, n, hits / n, *wilson_interval(hits, n))


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927), valid for small n."""
    share, z_squared = hits / n, Z_95 * Z_95
    scale = 1 + z_squared / n
    center = (share + z_squared / (2 * n)) / scale
    half_width = Z_95 / scale * math.sqrt(share * (1 - share) / n + z_squared / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def upper_confidence_limit(hits: int, n: int, error: float) -> float:
    """Return the one-sided upper confidence limit of a proportion (Clopper and Pearson 1934).

    Args:
        hits: Number of hits, that is, cases with the counted property.
        n: Number of all cases.
        error: Maximum probability that the true share is above the limit.
    """
    if hits >= n:
        return 1.0
    counts = np.arange(hits + 1)
    # Logarithms of the binomial coefficients "n choose count".
    log_choose = np.concatenate([[0.0], np.cumsum(np.log((n - counts[1:] + 1) / counts[1:]))])
    low = hits / n
    high = 1.0
    for _ in range(BISECTION_STEPS):
        share = (low + high) / 2
        # Probability of at most `hits` cases if the true share is `share`; it decreases as `share` grows.
        probability = np.exp(log_choose + counts * math.log(share) + (n - counts) * math.log1p(-share)).sum()
        if probability > error:
            low = share
        else:
            high = share
    return high


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of all values except None, or None without values."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation coefficient of pairs of values.

    Attributes:
        n: Number of pairs.
        r: The coefficient, from -1 to 1; None if all first or all second values are equal.
    """

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
    """How often two graders agree on whether answers are correct.

    Attributes:
        side: Which answers were graded: 'closed' (without passages), 'open' (with passages) or 'both'.
        first: Name of the first grader.
        second: Name of the second grader.
        n: Number of answers.
        agree: Share of answers on which the graders agree.
        kappa: Cohen's kappa, the agreement beyond chance; None if it is not defined.
        only_first: Number of answers that only the first grader accepts.
        only_second: Number of answers that only the second grader accepts.
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
    """Measure how often two graders agree.

    Args:
        side: Which answers were graded: 'closed' (without passages), 'open' (with passages) or 'both'.
        names: Names of the two graders.
        pairs: For each answer, whether the first and the second grader accept it.
    """
    return GraderAgreement(
        side,
        first=names[0],
        second=names[1],
        n=len(pairs),
        agree=sum(first == second for first, second in pairs) / max(1, len(pairs)),
        kappa=cohens_kappa(pairs),
        only_first=sum(first and not second for first, second in pairs),
        only_second=sum(second and not first for first, second in pairs),
    )


def cohens_kappa(pairs: Sequence[tuple[bool, bool]]) -> float | None:
    """Return Cohen's kappa, the agreement of two graders beyond chance (Cohen 1960).

    Args:
        pairs: For each answer, whether the first and the second grader accept it.

    Returns:
        1 if the graders always agree, 0 if they agree as often as by chance. None without pairs, or if both graders
        always give the same verdict, so that kappa is not defined.
    """
    n = len(pairs)
    if not n:
        return None
    agreement = sum(first == second for first, second in pairs) / n
    # How often each grader says True, and how often they would agree if they decided independently.
    first_rate = sum(first for first, _ in pairs) / n
    second_rate = sum(second for _, second in pairs) / n
    by_chance = first_rate * second_rate + (1 - first_rate) * (1 - second_rate)
    if math.isclose(by_chance, 1):
        return None
    return (agreement - by_chance) / (1 - by_chance)


@dataclass(frozen=True)
class PairedComparison:
    """A comparison of two gates on the same questions.

    Attributes:
        gate: Name of the first gate.
        against: Name of the second gate, which the first is compared with.
        difference: Accuracy of the first gate minus accuracy of the second gate.
        low: Lower end of the 95 % interval of the difference.
        high: Upper end of the 95 % interval of the difference.
        p_bootstrap: Bootstrap p-value of the hypothesis that the difference is 0.
        p_mcnemar: p-value of McNemar's test.
        only_gate: Number of questions that only the first gate answers correctly.
        only_against: Number of questions that only the second gate answers correctly.
        p_holm: `p_mcnemar` after Holm's correction for all comparisons of the same table.
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
    """Test whether two systems answer equally many questions right (McNemar's exact test).

    Args:
        first: Whether the first system answers each question correctly.
        second: Whether the second system answers each question correctly.

    Returns:
        The p-value, the number of questions that only the first system answers correctly, and the number of questions
        that only the second system answers correctly.
    """
    with require_extra("comparing gates", "train"):
        from scipy.special import betainc  # `scipy.stats` takes a second to import
    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    n = only_first + only_second
    smaller = min(only_first, only_second)
    # Twice the probability of at most `smaller` heads in n tosses of a coin. For equal numbers, this is more than 1.
    p_value = min(1.0, 2 * float(betainc(n - smaller, smaller + 1, 0.5))) if n else 1.0
    return p_value, only_first, only_second


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple tests (Holm 1979).

    The smallest of n p-values is multiplied by n, the next by n - 1, and so on.
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.zeros(len(p_values))
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, np.array(p_values)[order] * factors))
    return corrected.tolist()


def format_proportion(proportion: Proportion, missing: str = MISSING_VALUE) -> str:
    """Format a proportion. Example: '52.0 % [48.1, 55.9], n = 600'."""
    if proportion.value is None:
        return missing
    return f"{format_percent_estimate(proportion)}, n = {proportion.n}"


def format_percent_estimate(estimate: Estimate | Proportion) -> str:
    """Format a share with its interval as '52.0 % [48.1, 55.9]', or a dash if it is not defined."""
    return _format_estimate(estimate, format_percent, lambda end: f"{100 * end:.1f}")


def format_points_estimate(estimate: Estimate) -> str:
    """Format a difference of two shares with its interval, in percentage points, as '+1.2 [-0.3, +2.7]'."""
    return _format_estimate(estimate, format_points, format_points)


def _format_estimate(
    estimate: Estimate | Proportion, format_value: Callable[[float], str], format_end: Callable[[float], str]
) -> str:
    """Format the value and the interval of an estimate. A dash means not defined."""
    if estimate.value is None:
        return MISSING_VALUE
    value = format_value(estimate.value)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{format_end(estimate.low)}, {format_end(estimate.high)}]"


def format_p_value(p_value: float) -> str:
    """Format a p-value with three decimals, or as '< 0.001' if it is smaller."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
