"""Bootstrap confidence intervals.

Resamples depend only on the number of questions and the seed. Two systems that are measured on the same questions
therefore use the same resamples, and the interval of their difference is a paired interval.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from knowgate.errors import BadInput
from knowgate.stats import metrics
from knowgate.stats.metrics import BoolArray, FloatArray, NeedRanking, WeightMatrix, unit_weights, weighted_mean

DEFAULT_RESAMPLES = 2_000
PORTION_SIZE = 250  # resamples that share a random generator; for 10,000 questions they take 10 MB
LARGE_SAMPLE = 20_000  # above this number of questions, fewer resamples are in memory at once
MAX_DISTINCT_VALUES = 64  # a large sample with at most this many values is resampled by the counts of its values
MAX_COUNTS_IN_MEMORY = 2_000_000  # resamples x questions; 56 MB while they are drawn
INTERVAL_QUANTILES = (0.025, 0.975)  # ends of a 95 % interval
QUALITY_METRICS = ("auroc", "auprc", "accuracy", "ece", "brier")


@dataclass(frozen=True)
class Estimate:
    """Estimated metric with its 95 % confidence interval.

    Attributes:
        value: Value on the original sample; None if the metric is not defined there.
        low: Lower end of the interval; None if there is no interval.
        high: Upper end of the interval; None if there is no interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None

    def format(self, digits: int = 3) -> str:
        """Format the estimate. Example: '0.812 [0.790, 0.833]'."""
        if self.value is None:
            return "not defined"
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


# Function from weights (resamples x questions) to named metrics, each with one value per resample.
WeightedMetric = Callable[[WeightMatrix], Mapping[str, FloatArray]]


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap resamples of `n` questions, drawn with replacement.

    Resamples are computed in portions, in parallel. Portion 0 is the original sample.

    Attributes:
        n: Number of questions.
        resamples: Number of resamples.
        seed: Seed of the random generator.
    """

    n: int
    resamples: int = DEFAULT_RESAMPLES
    seed: int = 0

    @property
    def n_portions(self) -> int:
        """Number of portions, including the original sample."""
        return 1 + math.ceil(self.resamples / PORTION_SIZE)

    def iter_weight_blocks(self, number: int) -> Iterator[WeightMatrix]:
        """Yield blocks of weights (resamples x questions): how often each resample draws each question.

        Blocks are parts of a portion, to save memory.

        Args:
            number: Number of the portion. Portion 0 is the original sample; each other one has PORTION_SIZE resamples.
        """
        if number == 0:
            yield unit_weights(self.n)
            return
        n_in_earlier_portions = (number - 1) * PORTION_SIZE
        n_left = min(PORTION_SIZE, self.resamples - n_in_earlier_portions)
        block_size = PORTION_SIZE if self.n <= LARGE_SAMPLE else max(1, MAX_COUNTS_IN_MEMORY // self.n)
        rng = np.random.default_rng([self.seed, number])
        while n_left:
            size = min(n_left, block_size)
            # In row r (resample r), question numbers are shifted by r * n. So one bincount counts each row separately.
            picks = rng.integers(0, self.n, (size, self.n)) + np.arange(size)[:, None] * self.n
            counts = np.bincount(picks.ravel(), minlength=size * self.n).reshape(size, self.n)
            yield counts.astype(np.float32, order="F")  # rank-based metrics read it column by column
            n_left -= size

    def apply(self, functions: Sequence[WeightedMetric], *, with_original: bool = True) -> list[dict[str, FloatArray]]:
        """Compute metrics on the original sample and on every resample, in parallel.

        Args:
            functions: Each computes one or more named metrics for each resample.
            with_original: Whether the first value is computed on the original sample.

        Returns:
            For each function, its metrics by name: arrays with one value for each resample.
        """
        portions = range(0 if with_original else 1, self.n_portions)  # portion 0 is the original sample
        if not portions:
            return [{} for _ in functions]

        def compute_portion(number: int) -> list[list[Mapping[str, FloatArray]]]:
            """Call all functions on one portion of the resamples. Return for each block a result per function."""
            return [[function(weights) for function in functions] for weights in self.iter_weight_blocks(number)]

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:  # numpy releases the GIL
            blocks = list(itertools.chain.from_iterable(pool.map(compute_portion, portions)))
        results = []
        for function_blocks in zip(*blocks, strict=True):  # the metrics of one function, block by block
            names = function_blocks[0]
            results.append({name: np.concatenate([block[name] for block in function_blocks]) for name in names})
        return results


def summarize_resamples(values: FloatArray) -> Estimate:
    """Make an estimate with a 95 % interval from bootstrap resamples.

    Args:
        values: Value on the original sample, followed by the values on the resamples. Values of resamples that are not
            finite are ignored.
    """
    original = values[0]
    if not np.isfinite(original):
        return Estimate(None)
    resampled = values[1:][np.isfinite(values[1:])]
    if not len(resampled):
        return Estimate(float(original))
    low, high = np.quantile(resampled, INTERVAL_QUANTILES)
    return Estimate(float(original), float(low), float(high))


def estimate_mean(values: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """Estimate the mean of one value per question, with a bootstrap interval.

    Raises:
        BadInput: There are no values.
    """
    if not len(values):
        raise BadInput("there are no questions to measure. Record some answers first: knowgate label")
    if len(values) > LARGE_SAMPLE:
        distinct = np.unique(values)
        if len(distinct) <= MAX_DISTINCT_VALUES:
            return _estimate_mean_of_counts(values, distinct, resamples)
    bootstrap = Bootstrap(len(values), resamples)
    return _estimate(lambda weights: {"mean": weighted_mean(weights, values)}, bootstrap)["mean"]


def _estimate_mean_of_counts(values: FloatArray, distinct: FloatArray, resamples: int) -> Estimate:
    """Estimate the mean of a large sample with few distinct values.

    Drawing counts of values is much faster than drawing questions.

    Args:
        values: The sample.
        distinct: Its distinct values, sorted.
        resamples: Number of resamples.
    """
    n = len(values)
    value_numbers = np.searchsorted(distinct, values)  # index of each value in `distinct`
    shares = np.bincount(value_numbers) / n  # share of each distinct value in the sample
    counts = np.random.default_rng([0, n]).multinomial(n, shares, resamples)  # resamples x distinct values
    original = weighted_mean(unit_weights(n), values)
    return summarize_resamples(np.concatenate([original, counts @ distinct / n]))


def estimate_means(columns: Sequence[FloatArray], resamples: int = DEFAULT_RESAMPLES) -> list[Estimate]:
    """Estimate the mean of each column, with a bootstrap interval.

    NaN marks missing values. The estimate of a column without values is None.
    """
    names = [str(number) for number in range(len(columns))]  # metrics must have names, so columns get their number
    estimates: dict[str, Estimate] = {}  # by name
    by_length: dict[int, dict[str, FloatArray]] = {}  # columns of equal length share their resamples
    for name, column in zip(names, columns, strict=True):
        known = column[~np.isnan(column)]
        if not len(known):
            estimates[name] = Estimate(None)
        elif len(known) < len(column) or len(column) > LARGE_SAMPLE:
            estimates[name] = estimate_mean(known, resamples)
        else:
            by_length.setdefault(len(column), {})[name] = column
    for length, same_length in by_length.items():
        estimates |= _estimate(functools.partial(_compute_means, same_length), Bootstrap(length, resamples))
    return [estimates[name] for name in names]


def _compute_means(columns: Mapping[str, FloatArray], weights: WeightMatrix) -> dict[str, FloatArray]:
    """Compute the weighted means of columns of equal length."""
    return {name: weighted_mean(weights, column) for name, column in columns.items()}


def estimate_quality(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Estimate]:
    """Estimate how well a gate's scores predict which questions need retrieval.

    Args:
        needed: Whether each question really needed retrieval.
        needs: The gate's need for retrieval of each question, from 0 (the LLM knows) to 1 (retrieve).
        resamples: Number of bootstrap resamples.

    Returns:
        AUROC, AUPRC, accuracy at the threshold 0.5, expected calibration error and Brier score, keyed by name. Without
        questions, no metric is defined.
    """
    ranking = NeedRanking(needs)

    def compute_quality(weights: WeightMatrix) -> dict[str, FloatArray]:
        """Compute each metric for each resample. `weights` counts how often a resample draws each question.

        `needed` is the truth, whether a question needed retrieval. `needs` are the predictions.
        """
        areas = ranking.areas(ranking.sort(weights), needed)
        return {
            "auroc": areas["auroc"],
            "auprc": areas["auprc"],
            "accuracy": metrics.weighted_accuracy(weights, needed, needs),
            "ece": metrics.weighted_ece(weights, needed, needs),
            "brier": metrics.weighted_brier(weights, needed, needs),
        }

    if not len(needs):
        return dict.fromkeys(QUALITY_METRICS, Estimate(None))
    return _estimate(compute_quality, Bootstrap(len(needs), resamples))


def estimate_auroc(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """Estimate the AUROC of a gate's scores, with a bootstrap interval.

    Args:
        needed: Whether each question really needed retrieval.
        needs: The gate's score of each question, from 0 (the LLM knows) to 1 (retrieve).
        resamples: Number of bootstrap resamples.
    """
    if not len(needs):
        return Estimate(None)
    ranking = NeedRanking(needs)

    def compute_auroc(weights: WeightMatrix) -> dict[str, FloatArray]:
        return {"auroc": ranking.auroc(ranking.sort(weights), needed)}

    return _estimate(compute_auroc, Bootstrap(len(needs), resamples))["auroc"]


def _estimate(metric: WeightedMetric, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Estimate each value of a metric function, with a bootstrap interval."""
    (resampled,) = bootstrap.apply([metric])
    return {name: summarize_resamples(values) for name, values in resampled.items()}


def bootstrap_p_value(differences: FloatArray) -> float:
    """Return the two-sided bootstrap p-value for a difference of two systems.

    Small values mean: nearly all resamples have the same sign.

    Args:
        differences: Differences between the two systems. The first difference is that of the original sample, and is
            ignored. All others are those of the resamples.
    """
    resampled = differences[1:][np.isfinite(differences[1:])]
    if not len(resampled):
        return 1.0
    # No number of resamples can prove a p-value of 0. So one more resample is counted on each side.
    below, above = np.sum(resampled <= 0) + 1, np.sum(resampled >= 0) + 1
    return float(min(1.0, 2 * min(below, above) / (len(resampled) + 1)))
