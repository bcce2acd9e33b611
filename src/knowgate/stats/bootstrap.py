"""The bootstrap: how often each question is drawn, and intervals from what comes out.

Whatever is measured on as many questions with the same seed is measured on the same draws, so differences are paired.
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
PORTION_SIZE = 250  # resamples held in memory at once: 10,000 questions make 10 MB
LARGE_SAMPLE = 20_000  # questions; of more, fewer resamples are in memory at once
MAX_DISTINCT_VALUES = 64  # different values that questions may have to be drawn by value
MAX_COUNTS_IN_MEMORY = 2_000_000  # those that are: 56 MB while they are drawn
INTERVAL_QUANTILES = (0.025, 0.975)
QUALITY_METRICS = ("auroc", "auprc", "accuracy", "ece", "brier")


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; value is None where the measure is not defined (one kind of question only)."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def shown(self, digits: int = 3) -> str:
        if self.value is None:
            return "not defined"
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


WeightedMetric = Callable[[WeightMatrix], Mapping[str, FloatArray]]


@dataclass(frozen=True)
class Bootstrap:
    """Resamples of n questions. The first value of what `apply` gives belongs to the questions as they are."""

    n: int
    resamples: int = DEFAULT_RESAMPLES
    seed: int = 0

    @property
    def portions(self) -> int:
        return 1 + -(-self.resamples // PORTION_SIZE)

    def portion(self, number: int) -> WeightMatrix:
        """How often each question is drawn: one row of counts per resample. Portion 0 takes every question once."""
        return np.concatenate(list(self.pieces(number)))

    def pieces(self, number: int) -> Iterator[WeightMatrix]:
        """The same counts, few enough at a time that memory stays flat however many questions there are."""
        if number == 0:
            yield unit_weights(self.n)
            return
        left = min(PORTION_SIZE, self.resamples - (number - 1) * PORTION_SIZE)
        rng = np.random.default_rng([self.seed, number])
        while left:
            size = min(left, PORTION_SIZE if self.n <= LARGE_SAMPLE else max(1, MAX_COUNTS_IN_MEMORY // self.n))
            picks = rng.integers(0, self.n, (size, self.n)) + np.arange(size)[:, None] * self.n
            yield np.bincount(picks.ravel(), minlength=size * self.n).reshape(size, self.n).astype(np.float32)
            left -= size

    def apply(self, measures: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """Each measure on the questions as they are and on every resample; all of them on the same draws."""
        return self._over(range(self.portions), measures)

    def resample(self, measures: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """The same without the questions as they are; nothing where there are no resamples."""
        return self._over(range(1, self.portions), measures) if self.resamples else [{} for _ in measures]

    def _over(self, portions: Sequence[int], measures: Sequence[WeightedMetric]) -> list[dict[str, FloatArray]]:
        """Portions go to as many threads as there are cores: numpy lets go of the interpreter while it counts."""

        def measured(number: int) -> list[list[Mapping[str, FloatArray]]]:
            return [[measure(weights) for measure in measures] for weights in self.pieces(number)]

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            pieces = [piece for portion in pool.map(measured, portions) for piece in portion]
        return [
            {name: np.concatenate([piece[number][name] for piece in pieces]) for name in pieces[0][number]}
            for number in range(len(measures))
        ]


def summarize_resamples(values: FloatArray) -> Estimate:
    """From the plain value (first) and those of the resamples."""
    plain, drawn = values[0], values[1:][np.isfinite(values[1:])]
    if not np.isfinite(plain):
        return Estimate(None)
    if not len(drawn):
        return Estimate(float(plain))
    return Estimate(float(plain), *(float(edge) for edge in np.quantile(drawn, INTERVAL_QUANTILES)))


def estimate_mean(values: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """The mean of per-question values; of differences between two systems on the same questions it is paired."""
    if not len(values):
        raise BadInput("there is no question to measure on. Label some: knowgate label")
    if len(values) > LARGE_SAMPLE and len(kinds := np.unique(values)) <= MAX_DISTINCT_VALUES:
        return _estimate_kinds(values, kinds, resamples)
    return _estimates(lambda weights: {"mean": weighted_mean(weights, values)}, Bootstrap(len(values), resamples))[
        "mean"
    ]


def _estimate_kinds(values: FloatArray, kinds: FloatArray, resamples: int, seed: int = 0) -> Estimate:
    """Of very many questions with few different values: how often each value is drawn is multinomial."""
    shares = np.bincount(np.searchsorted(kinds, values)) / len(values)
    drawn = np.random.default_rng([seed, len(values)]).multinomial(len(values), shares, resamples) @ kinds
    return summarize_resamples(np.concatenate([weighted_mean(unit_weights(len(values)), values), drawn / len(values)]))


def estimate_means(columns: Sequence[FloatArray], resamples: int = DEFAULT_RESAMPLES) -> list[Estimate]:
    """The mean of each column of per-question values, all on the same draws: many of them cost little more than one.

    Questions without a value (NaN) are left out of their column alone.
    """
    whole = [number for number, column in enumerate(columns) if len(column) and not np.isnan(column).any()]
    found = {
        number: _mean_of_known(columns[number], resamples) for number in range(len(columns)) if number not in whole
    }
    many = [number for number in whole if len(columns[number]) > LARGE_SAMPLE]
    found |= {number: estimate_mean(columns[number], resamples) for number in many}
    for size in {len(columns[number]) for number in whole if number not in many}:
        some = [number for number in whole if len(columns[number]) == size]
        found |= _means_together({number: columns[number] for number in some}, Bootstrap(size, resamples))
    return [found[number] for number in range(len(columns))]


def _means_together(columns: Mapping[int, FloatArray], draws: Bootstrap) -> dict[int, Estimate]:
    def means(weights: WeightMatrix) -> dict[str, FloatArray]:
        return {str(number): weighted_mean(weights, column) for number, column in columns.items()}

    return {int(name): found for name, found in _estimates(means, draws).items()}


def _mean_of_known(column: FloatArray, resamples: int) -> Estimate:
    known = column[~np.isnan(column)]
    return estimate_mean(known, resamples) if len(known) else Estimate(None)


def estimate_quality(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Estimate]:
    """How good needs are: auroc, auprc, accuracy (of need above 0.5), ece, brier. Without questions none is defined."""
    ranked = NeedRanking(needs)

    def quality(weights: WeightMatrix) -> dict[str, FloatArray]:
        drawn = ranked.sort(weights)
        return {
            "auroc": ranked.auroc(drawn, needed),
            "auprc": ranked.precision_and_risk(drawn, needed)["auprc"],
            "accuracy": weighted_accuracy(weights, needed, needs),
            "ece": weighted_ece(weights, needed, needs),
            "brier": weighted_brier(weights, needed, needs),
        }

    if not len(needs):
        return dict.fromkeys(QUALITY_METRICS, Estimate(None))
    return _estimates(quality, Bootstrap(len(needs), resamples))


def estimate_auroc(needed: BoolArray, needs: FloatArray, resamples: int = DEFAULT_RESAMPLES) -> Estimate:
    """The one of `estimate_quality`, in half the time."""
    ranked = NeedRanking(needs)
    if not len(needs):
        return Estimate(None)
    found = _estimates(
        lambda weights: {"auroc": ranked.auroc(ranked.sort(weights), needed)}, Bootstrap(len(needs), resamples)
    )
    return found["auroc"]


def _estimates(measure: WeightedMetric, draws: Bootstrap) -> dict[str, Estimate]:
    return {name: summarize_resamples(values) for name, values in draws.apply([measure])[0].items()}


def bootstrap_p_value(differences: FloatArray) -> float:
    """Two-sided bootstrap p-value of a difference being 0; never below what this many resamples can show."""
    drawn = differences[1:][np.isfinite(differences[1:])]
    if not len(drawn):
        return 1.0
    below, above = np.sum(drawn <= 0) + 1, np.sum(drawn >= 0) + 1
    return float(min(1.0, 2 * min(below, above) / (len(drawn) + 1)))
