"""Accuracy at every retrieval rate: what a gate's order of the questions is worth, whatever its threshold."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from knowgate.stats.metrics import BoolArray, FloatArray


@dataclass(frozen=True)
class Frontier:
    """Exact top-k curve: point k retrieves for the k questions of highest need. Ties give the mean over their orders.

    area: mean accuracy over all rates. random_area: that of retrieving at random, a straight line.
    """

    rates: FloatArray
    accuracies: FloatArray
    area: float
    random_area: float

    def at(self, rate: float) -> float:
        return float(np.interp(rate, self.rates, self.accuracies))


def compute_frontier(closed_right: BoolArray, open_right: BoolArray, needs: FloatArray) -> Frontier:
    n = len(needs)
    gains = open_right.astype(float) - closed_right.astype(float)
    order = np.argsort(-needs, kind="stable")
    # within a tie every order is as likely: its questions share the tie's mean gain
    starts = np.flatnonzero(np.diff(-needs[order], prepend=np.nan) != 0)
    sizes = np.diff(np.append(starts, n))
    means = np.repeat(np.add.reduceat(gains[order], starts) / sizes, sizes)
    accuracies = (closed_right.sum() + np.concatenate([[0.0], np.cumsum(means)])) / n
    rates = _rates(n)
    straight = (accuracies[0] + accuracies[-1]) / 2
    return Frontier(rates, accuracies, float((accuracies[:-1] + accuracies[1:]).mean() / 2), float(straight))


@functools.lru_cache(maxsize=1)
def _rates(n: int) -> FloatArray:
    """All gates have the same ones: of a million questions they take 8 MB."""
    return np.arange(n + 1) / n


def compute_oracle_frontier(closed_right: BoolArray, open_right: BoolArray) -> Frontier:
    """The best order there is: first where retrieval helps, last where it hurts."""
    return compute_frontier(closed_right, open_right, (open_right.astype(float) - closed_right.astype(float) + 1) / 2)
