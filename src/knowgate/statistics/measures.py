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

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Weights = NDArray[np.floating[Any]]  # 32 bits for resamples, of which there are many; 64 for the questions themselves
BINS = 15
AT_ONCE = 100_000  # questions whose bins are in memory


def weighted_mean(weights: Weights, values: NDArray[Any]) -> Floats:
    """Of one value for each question; of a table of them (questions x columns), column by column."""
    total = weights.sum(axis=1, dtype=np.float64).reshape(-1, *[1] * (values.ndim - 1))
    return divided((weights @ values.astype(weights.dtype)).astype(np.float64), total)


def weighted_accuracy(weights: Weights, needed: Bools, needs: Floats, threshold: float = 0.5) -> Floats:
    """Of the verdict 'needed where need is above the threshold'."""
    return weighted_mean(weights, (needs > threshold) == needed)


def weighted_brier(weights: Weights, needed: Bools, needs: Floats) -> Floats:
    return weighted_mean(weights, (needs - needed) ** 2)


def weighted_ece(weights: Weights, needed: Bools, needs: Floats) -> Floats:
    """Expected calibration error over bins of equal width."""
    gaps: NDArray[Any] = np.zeros((len(weights), BINS), dtype=weights.dtype)
    for start in range(0, len(needs), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        inside = (ece_bins(needs[some])[:, None] == np.arange(BINS)).astype(weights.dtype)
        gaps += weights[:, some] @ (inside * (needs[some] - needed[some])[:, None].astype(weights.dtype))
    return divided(np.abs(gaps).sum(axis=1, dtype=np.float64), weights.sum(axis=1, dtype=np.float64))


def ece_bins(needs: Floats) -> NDArray[np.int64]:
    """The bin of each need, of equal width."""
    bins: NDArray[np.int64] = np.minimum((needs * BINS).astype(int), BINS - 1)
    return bins


@dataclass(frozen=True)
class Ranked:
    """Questions in the order of their need, equal ones together."""

    needs: Floats

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return np.argsort(self.needs, kind="stable")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each group of equal needs begins."""
        return np.flatnonzero(np.diff(self.needs[self.order], prepend=np.nan) != 0)

    def sorted(self, weights: Weights) -> Weights:
        """The weights in the order of need: what the measures of rank take."""
        return weights[:, self.order]

    def auroc(self, drawn: Weights, needed: Bools) -> Floats:
        """Probability that a needed question has more need than another; ties count half."""
        yes, no = self._split(drawn, needed)
        below = np.cumsum(no, axis=1)
        below -= no / 2
        return divided(_dot(yes, below), _total(yes) * _total(no))

    def precision_and_risk(self, drawn: Weights, needed: Bools) -> dict[str, Floats]:
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
        return {"auprc": divided(_dot(yes, precision), positives), "aurc": divided(_dot(every, risk), total)}

    def _split(self, drawn: Weights, needed: Bools) -> tuple[Weights, Weights]:
        kinds = needed[self.order]
        yes, no = drawn * kinds, drawn * ~kinds
        if len(self.starts) == len(self.needs):
            return yes, no
        return np.add.reduceat(yes, self.starts, axis=1), np.add.reduceat(no, self.starts, axis=1)


def divided(above: Floats, below: Floats) -> Floats:
    """The quotient, NaN where there is nothing to divide by."""
    quotient: Floats = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)
    return quotient


def _dot(first: NDArray[Any], second: NDArray[Any]) -> Floats:
    product: Floats = (first * second).sum(axis=1, dtype=np.float64)
    return product


def _total(weights: Weights) -> Floats:
    total: Floats = weights.sum(axis=1, dtype=np.float64)
    return total


# --- of the questions as they are -----------------------------------------------------------------


def auroc(needed: Bools, needs: Floats) -> float | None:
    """Probability that a needed question has more need than another, ties for half; None where one kind is missing."""
    ranked = Ranked(needs)
    return _plain(ranked.auroc(ranked.sorted(once(len(needs))), needed)) if len(needs) else None


def auprc(needed: Bools, needs: Floats) -> float | None:
    """Average precision; None where nothing is needed."""
    ranked = Ranked(needs)
    drawn = ranked.sorted(once(len(needs)))
    return _plain(ranked.precision_and_risk(drawn, needed)["auprc"]) if len(needs) else None


def accuracy(needed: Bools, needs: Floats, threshold: float = 0.5) -> float | None:
    """Of the verdict 'needed where need is above the threshold'; None without questions."""
    return _plain(weighted_accuracy(once(len(needs)), needed, needs, threshold))


def brier(needed: Bools, needs: Floats) -> float | None:
    return _plain(weighted_brier(once(len(needs)), needed, needs))


def ece(needed: Bools, needs: Floats) -> float | None:
    """Expected calibration error over bins of equal width."""
    return _plain(weighted_ece(once(len(needs)), needed, needs))


def once(n: int) -> Weights:
    """Every question counted once."""
    return np.ones((1, n))


def _plain(values: Floats) -> float | None:
    return float(values[0]) if np.isfinite(values[0]) else None
