"""Measures of a need, for many weightings of the same questions at once: a bootstrap resample is a row of counts.

Each measure takes weights (resamples x questions) and gives one value per resample, NaN where it is not defined. With
all weights 1 it is the plain measure. Sorting is done once for all resamples and all measures of rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Weights = NDArray[np.float32]
BINS = 15


def mean(weights: Weights, values: NDArray[Any]) -> Floats:
    total = weights.sum(axis=1, dtype=np.float64)
    return divided((weights @ values.astype(np.float32)).astype(np.float64), total)


def brier(weights: Weights, needed: Bools, needs: Floats) -> Floats:
    return mean(weights, (needs - needed) ** 2)


def ece(weights: Weights, needed: Bools, needs: Floats) -> Floats:
    """Expected calibration error over bins of equal width."""
    bins = np.minimum((needs * BINS).astype(int), BINS - 1)
    inside = (bins[:, None] == np.arange(BINS)).astype(np.float32)
    gaps = np.abs(weights @ (inside * (needs - needed)[:, None].astype(np.float32)))
    return divided(gaps.sum(axis=1, dtype=np.float64), weights.sum(axis=1, dtype=np.float64))


@dataclass(frozen=True)
class Ranked:
    """Questions in the order of their need, equal ones together, and which of them are needed."""

    needed: Bools
    needs: Floats

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return np.argsort(self.needs, kind="stable")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each group of equal needs begins."""
        return np.flatnonzero(np.diff(self.needs[self.order], prepend=np.nan) != 0)

    def measures(self, weights: Weights) -> dict[str, Floats]:
        """auroc, auprc (as scikit-learn's average precision) and aurc; ties count as one group."""
        drawn = weights[:, self.order]
        every = self._grouped(drawn)
        yes = self._grouped(drawn * self.needed[self.order])
        no = every - yes
        positives, negatives = yes.sum(axis=1, dtype=np.float64), no.sum(axis=1, dtype=np.float64)
        no_up_to, all_up_to, yes_up_to = (np.cumsum(part, axis=1) for part in (no, every, yes))
        total = positives + negatives
        wins = _dot(yes, no_up_to - no / 2)
        # from the highest need down: what remains above the groups below
        hits = positives[:, None] - yes_up_to + yes
        seen = total[:, None] - all_up_to + every
        precision = hits / np.maximum(seen, 1)
        risk = yes_up_to / np.maximum(all_up_to, 1)
        return {
            "auroc": divided(wins, positives * negatives),
            "auprc": divided(_dot(yes, precision), positives),
            "aurc": divided(_dot(every, risk), total),
        }

    def _grouped(self, weights: Weights) -> Weights:
        if len(self.starts) == len(self.needs):
            return weights
        return np.add.reduceat(weights, self.starts, axis=1)


def divided(above: Floats, below: Floats) -> Floats:
    """The quotient, NaN where there is nothing to divide by."""
    quotient: Floats = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)
    return quotient


def _dot(first: NDArray[Any], second: NDArray[Any]) -> Floats:
    product: Floats = np.einsum("ij,ij->i", first, second, dtype=np.float64)
    return product
