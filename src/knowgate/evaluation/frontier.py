"""Accuracy as a function of the retrieval rate, independent of a gate's threshold."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from knowgate.stats.metrics import BoolArray, FloatArray


@dataclass(frozen=True)
class Frontier:
    """Accuracy at every retrieval rate when the questions of highest need are retrieved for first.

    Attributes:
        rates: Retrieval rates k / n, for k = 0 to n.
        accuracies: Accuracy at each rate. Questions with equal needs share their mean gain.
        area: Area under the curve, which is the mean accuracy over all rates.
        random_area: Area under the straight line that random retrieval gives.
    """

    rates: FloatArray
    accuracies: FloatArray
    area: float
    random_area: float

    def at(self, rate: float) -> float:
        """Return the accuracy at a retrieval rate, interpolated linearly."""
        return float(np.interp(rate, self.rates, self.accuracies))


def compute_frontier(closed_right: BoolArray, open_right: BoolArray, needs: FloatArray) -> Frontier:
    """Compute the frontier of a gate.

    Args:
        closed_right: Whether each closed-book answer is correct.
        open_right: Whether each answer with passages is correct.
        needs: The gate's need score of each question.
    """
    n = len(needs)
    gains = open_right.astype(float) - closed_right.astype(float)
    order = np.argsort(-needs, kind="stable")
    # Every order within a tie is equally likely, so tied questions share the mean gain of their tie.
    starts = np.flatnonzero(np.diff(-needs[order], prepend=np.nan) != 0)
    sizes = np.diff(np.append(starts, n))
    expected_gains = np.repeat(np.add.reduceat(gains[order], starts) / sizes, sizes)
    accuracies = (closed_right.sum() + np.concatenate([[0.0], np.cumsum(expected_gains)])) / n
    area = (accuracies[:-1] + accuracies[1:]).mean() / 2
    random_area = (accuracies[0] + accuracies[-1]) / 2
    return Frontier(_retrieval_rates(n), accuracies, float(area), float(random_area))


@functools.lru_cache(maxsize=1)
def _retrieval_rates(n: int) -> FloatArray:
    """Return 0/n, 1/n, ..., n/n. Cached so that all gates share one array (8 MB for a million questions)."""
    return np.arange(n + 1) / n


def compute_oracle_frontier(closed_right: BoolArray, open_right: BoolArray) -> Frontier:
    """Compute the best possible frontier: questions that retrieval helps first, those it harms last."""
    needs = (open_right.astype(float) - closed_right.astype(float) + 1) / 2
    return compute_frontier(closed_right, open_right, needs)
