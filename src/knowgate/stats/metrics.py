"""Measures of a need, for many weightings of the same questions at once: a bootstrap resample is a row of counts.

Each weighted measure takes weights (resamples x questions) and gives one value per resample, NaN where it is not
defined. Sorting is done once for all resamples and all measures of rank. The plain measures at the end are the same
ones with all weights 1: there is no second way of counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
WeightMatrix = NDArray[
    np.floating[Any]
]  # 32 bits for resamples, of which there are many; 64 for the questions themselves
N_ECE_BINS = 15
ECE_BLOCK_SIZE = 100_000  # questions whose bins are in memory


def weighted_mean(weights: WeightMatrix, values: NDArray[Any]) -> FloatArray:
    """Of one value for each question; of a table of them (questions x columns), column by column."""
    total = weights.sum(axis=1, dtype=np.float64).reshape(-1, *[1] * (values.ndim - 1))
    return safe_divide((weights @ values.astype(weights.dtype)).astype(np.float64), total)


def weighted_accuracy(
    weights: WeightMatrix, needed: BoolArray, needs: FloatArray, threshold: float = 0.5
) -> FloatArray:
    """Of the verdict 'needed where need is above the threshold'."""
    return weighted_mean(weights, (needs > threshold) == needed)


def weighted_brier(weights: WeightMatrix, needed: BoolArray, needs: FloatArray) -> FloatArray:
    return weighted_mean(weights, (needs - needed) ** 2)


def weighted_ece(weights: WeightMatrix, needed: BoolArray, needs: FloatArray) -> FloatArray:
    """Expected calibration error over bins of equal width."""
    gaps: NDArray[Any] = np.zeros((len(weights), N_ECE_BINS), dtype=weights.dtype)
    for start in range(0, len(needs), ECE_BLOCK_SIZE):
        some = slice(start, start + ECE_BLOCK_SIZE)
        inside = (assign_ece_bins(needs[some])[:, None] == np.arange(N_ECE_BINS)).astype(weights.dtype)
        gaps += weights[:, some] @ (inside * (needs[some] - needed[some])[:, None].astype(weights.dtype))
    return safe_divide(np.abs(gaps).sum(axis=1, dtype=np.float64), weights.sum(axis=1, dtype=np.float64))


def assign_ece_bins(needs: FloatArray) -> NDArray[np.int64]:
    """The bin of each need, of equal width."""
    bins: NDArray[np.int64] = np.minimum((needs * N_ECE_BINS).astype(int), N_ECE_BINS - 1)
    return bins


@dataclass(frozen=True)
class NeedRanking:
    """Questions in the order of their need, equal ones together."""

    needs: FloatArray

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return np.argsort(self.needs, kind="stable")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each group of equal needs begins."""
        return np.flatnonzero(np.diff(self.needs[self.order], prepend=np.nan) != 0)

    def sorted(self, weights: WeightMatrix) -> WeightMatrix:
        """The weights in the order of need: what the measures of rank take."""
        return weights[:, self.order]

    def auroc(self, drawn: WeightMatrix, needed: BoolArray) -> FloatArray:
        """Probability that a needed question has more need than another; ties count half."""
        yes, no = self._split(drawn, needed)
        below = np.cumsum(no, axis=1)
        below -= no / 2
        return safe_divide(_dot(yes, below), _total(yes) * _total(no))

    def precision_and_risk(self, drawn: WeightMatrix, needed: BoolArray) -> dict[str, FloatArray]:
        """auprc (as scikit-learn's average precision) and aurc, the area under the risk-coverage curve."""
        yes, no = self._split(drawn, needed)
        every = yes + no
        hits, seen = np.cumsum(yes, axis=1), np.cumsum(every, axis=1)
        positives, total = _total(yes), _total(every)
        risk = hits / np.maximum(seen, 1)
        # from the highest need down: what is left above the groups below
        hits = positives[:, None].astype(drawn.dtype) - hits + yes
        seen = total[:, None].astype(drawn.dtype) - seen + every
        precision = hits / np.maximum(seen, 1)
        return {"auprc": safe_divide(_dot(yes, precision), positives), "aurc": safe_divide(_dot(every, risk), total)}

    def _split(self, drawn: WeightMatrix, needed: BoolArray) -> tuple[WeightMatrix, WeightMatrix]:
        kinds = needed[self.order]
        yes, no = drawn * kinds, drawn * ~kinds
        if len(self.starts) == len(self.needs):
            return yes, no
        return np.add.reduceat(yes, self.starts, axis=1), np.add.reduceat(no, self.starts, axis=1)


def safe_divide(above: FloatArray, below: FloatArray) -> FloatArray:
    """The quotient, NaN where there is nothing to divide by."""
    quotient: FloatArray = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)
    return quotient


def _dot(first: NDArray[Any], second: NDArray[Any]) -> FloatArray:
    product: FloatArray = (first * second).sum(axis=1, dtype=np.float64)
    return product


def _total(weights: WeightMatrix) -> FloatArray:
    total: FloatArray = weights.sum(axis=1, dtype=np.float64)
    return total


# --- of the questions as they are -----------------------------------------------------------------


def auroc(needed: BoolArray, needs: FloatArray) -> float | None:
    """Probability that a needed question has more need than another, ties for half; None where one kind is missing."""
    ranked = NeedRanking(needs)
    return _plain(ranked.auroc(ranked.sorted(unit_weights(len(needs))), needed)) if len(needs) else None


def auprc(needed: BoolArray, needs: FloatArray) -> float | None:
    """Average precision; None where nothing is needed."""
    ranked = NeedRanking(needs)
    drawn = ranked.sorted(unit_weights(len(needs)))
    return _plain(ranked.precision_and_risk(drawn, needed)["auprc"]) if len(needs) else None


def accuracy(needed: BoolArray, needs: FloatArray, threshold: float = 0.5) -> float | None:
    """Of the verdict 'needed where need is above the threshold'; None without questions."""
    return _plain(weighted_accuracy(unit_weights(len(needs)), needed, needs, threshold))


def brier(needed: BoolArray, needs: FloatArray) -> float | None:
    return _plain(weighted_brier(unit_weights(len(needs)), needed, needs))


def ece(needed: BoolArray, needs: FloatArray) -> float | None:
    """Expected calibration error over bins of equal width."""
    return _plain(weighted_ece(unit_weights(len(needs)), needed, needs))


def unit_weights(n: int) -> WeightMatrix:
    """Every question counted once."""
    return np.ones((1, n))


def _plain(values: FloatArray) -> float | None:
    return float(values[0]) if np.isfinite(values[0]) else None
