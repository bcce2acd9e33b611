"""Bootstrap confidence intervals.

Everything measured on the same number of questions with the same seed uses the same resamples, so differences between
two systems are paired.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from knowgate.errors import BadInput
from knowgate.stats.metrics import (
    BoolArray,
    FloatArray,
    NeedRanking,
    WeightMatrix,
    unit_weights,
    weighted_accuracy,
    weighted_brier,
    weighted_ece,
    weighted_mean,
)

DEFAULT_RESAMPLES = 2_000
PORTION_SIZE = 250  # resamples that share a random generator; 10,000 questions take 10 MB
LARGE_SAMPLE = 20_000  # questions above which fewer resamples are in memory at once
MAX_DISTINCT_VALUES = 64  # of a large sample, to draw the counts of values instead of questions
MAX_COUNTS_IN_MEMORY = 2_000_000  # 56 MB while they are drawn
INTERVAL_QUANTILES = (0.025, 0.975)
QUALITY_METRICS = ("auroc", "auprc", "accuracy", "ece", "brier")


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % interval. The value is None if the metric is not defined."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def format(self, digits: int = 3) -> str:
        """Format as '0.812 [0.790, 0.833]'."""
        if self.value is None:
            return "not defined"
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


WeightedMetric = Callable[[WeightMatrix], Mapping[str, FloatArray]]


@dataclass(frozen=True)
class Bootstrap:
    """Resamples of `n` questions, drawn in portions that can be computed in parallel.

    Portion 0 is the original sample, so the first value of every result belongs to it.
    """

    n: int
    resamples: int = DEFAULT_RESAMPLES
    seed: int = 0

    @property
    def n_portions(self) -> int:
        """Number of portions, including the original sample."""
        return 1 + -(-self.resamples // PORTION_SIZE)

    def draw_portion(self, number: int) -> WeightMatrix:
        """Return how often each question is drawn: one row of counts per resample."""
        return np.concatenate(list(self.iter_blocks(number)))

    def iter_blocks(self, number: int) -> Iterator[WeightMatrix]:
        """Yield the rows of a portion in blocks that fit into memory for any number of questions."""
        if number == 0:
            yield unit_weights(self.n)
            return
        left = min(PORTION_SIZE, self.resamples - (number - 1) * PORTION_SIZE)
        rng = np.random.default_rng([self.seed, number])
        while left:
            size = min(left, PORTION_SIZE if self.n <= LARGE_SAMPLE else max(1, MAX_COUNTS_IN_MEMORY // self.n))
            picks = rng.integers(0, self.n, (size, self.n)) + np.arange(size)[:, None] * self.n
            counts = np.bincount(picks.ravel(), minlength=size * self.n).reshape(size, self.n)
            yield counts.astype(np.float32, order="F")  # metrics of rank read it question by question
            left -= size

    def apply(self, metrics: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """Compute each metric on the original sample and on every resample."""
        return self._compute(range(self.n_portions), metrics)

    def resample(self, metrics: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """Compute each metric on every resample, without the original sample."""
        return self._compute(range(1, self.n_portions), metrics) if self.resamples else [{} for _ in metrics]

    def _compute(self, portions: Sequence[int], metrics: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """Compute metrics on some portions in parallel and join the results."""

        def compute(number: int) -> list[list[Mapping[str, FloatArray]]]:
            return [[metric(weights) for metric in metrics] for weights in self.iter_blocks(number)]

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:  # numpy releases the GIL
            blocks = [block for portion in pool.map(compute, portions) for block in portion]
        return [
            {name: np.concatenate([block[number][name] for block in blocks]) for name in blocks[0][number]}
            for number in range(len(metrics))
        ]


def summarize_resamples(values: FloatArray) -> Estimate:
    """Make an estimate from the value of the original sample (first) and those of the resamples."""
    original, resampled = values[0], values[1:][np.isfinite(values[1:])]
    if not np.isfinite(original):
        return Estimate(None)
    if not len(resampled):
        return Estimate(float(original))
    return Estimate(float(original), *(float(edge) for edge in np.quantile(resampled, INTERVAL_QUANTILES)))


def estimate_mean(values: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """Estimate the mean of one value per question. For differences of two systems the interval is paired."""
    if not len(values):
        raise BadInput("there is no question to measure on. Label some: knowgate label")
    if len(values) > LARGE_SAMPLE and len(distinct := np.unique(values)) <= MAX_DISTINCT_VALUES:
        return _estimate_mean_of_counts(values, distinct, resamples)
    return _estimate(lambda weights: {"mean": weighted_mean(weights, values)}, Bootstrap(len(values), resamples))[
        "mean"
    ]


def _estimate_mean_of_counts(values: FloatArray, distinct: FloatArray, resamples: int, seed: int = 0) -> Estimate:
    """Estimate the mean of many values of few kinds: the counts of the kinds in a resample are multinomial."""
    shares = np.bincount(np.searchsorted(distinct, values)) / len(values)
    sums = np.random.default_rng([seed, len(values)]).multinomial(len(values), shares, resamples) @ distinct
    original = weighted_mean(unit_weights(len(values)), values)
    return summarize_resamples(np.concatenate([original, sums / len(values)]))


def estimate_means(columns: Sequence[FloatArray], resamples: int = DEFAULT_RESAMPLES) -> list[Estimate]:
    """Estimate the mean of each column on shared resamples, which costs little more than a single column.

    NaN is a missing value: such questions are left out of their column only.
    """
    complete = [number for number, column in enumerate(columns) if len(column) and not np.isnan(column).any()]
    estimates = {
        number: _estimate_mean_of_known(columns[number], resamples)
        for number in range(len(columns))
        if number not in complete
    }
    large = [number for number in complete if len(columns[number]) > LARGE_SAMPLE]
    estimates |= {number: estimate_mean(columns[number], resamples) for number in large}
    for size in {len(columns[number]) for number in complete if number not in large}:
        same_size = {number: columns[number] for number in complete if len(columns[number]) == size}
        estimates |= _estimate_shared(same_size, Bootstrap(size, resamples))
    return [estimates[number] for number in range(len(columns))]


def _estimate_shared(columns: Mapping[int, FloatArray], bootstrap: Bootstrap) -> dict[int, Estimate]:
    """Estimate the means of columns of equal length on the same resamples."""

    def means(weights: WeightMatrix) -> dict[str, FloatArray]:
        return {str(number): weighted_mean(weights, column) for number, column in columns.items()}

    return {int(name): estimate for name, estimate in _estimate(means, bootstrap).items()}


def _estimate_mean_of_known(column: FloatArray, resamples: int) -> Estimate:
    """Estimate the mean of the values that are not NaN."""
    known = column[~np.isnan(column)]
    return estimate_mean(known, resamples) if len(known) else Estimate(None)


def estimate_quality(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Estimate]:
    """Estimate AUROC, AUPRC, accuracy at 0.5, ECE and Brier score of needs; none is defined without questions."""
    ranking = NeedRanking(needs)

    def quality(weights: WeightMatrix) -> dict[str, FloatArray]:
        sorted_weights = ranking.sort(weights)
        return {
            "auroc": ranking.auroc(sorted_weights, needed),
            "auprc": ranking.precision_and_risk(sorted_weights, needed)["auprc"],
            "accuracy": weighted_accuracy(weights, needed, needs),
            "ece": weighted_ece(weights, needed, needs),
            "brier": weighted_brier(weights, needed, needs),
        }

    if not len(needs):
        return dict.fromkeys(QUALITY_METRICS, Estimate(None))
    return _estimate(quality, Bootstrap(len(needs), resamples))


def estimate_auroc(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """Estimate only the AUROC, in half the time of `estimate_quality`."""
    if not len(needs):
        return Estimate(None)
    ranking = NeedRanking(needs)
    return _estimate(
        lambda weights: {"auroc": ranking.auroc(ranking.sort(weights), needed)}, Bootstrap(len(needs), resamples)
    )["auroc"]


def _estimate(metric: WeightedMetric, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Compute a metric on all resamples and summarize each of its values."""
    return {name: summarize_resamples(values) for name, values in bootstrap.apply([metric])[0].items()}


def bootstrap_p_value(differences: FloatArray) -> float:
    """Return the two-sided p-value of a difference being 0, from the original value (first) and the resamples.

    It is never below what this number of resamples can show.
    """
    resampled = differences[1:][np.isfinite(differences[1:])]
    if not len(resampled):
        return 1.0
    below, above = np.sum(resampled <= 0) + 1, np.sum(resampled >= 0) + 1
    return float(min(1.0, 2 * min(below, above) / (len(resampled) + 1)))
