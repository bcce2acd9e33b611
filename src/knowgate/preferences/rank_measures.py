"""How well passages are ordered: precision, recall and reciprocal rank at K (CBDR 4.1.4), with paired intervals."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput
from knowgate.preferences.record import Preference

KS = (1, 3, 5)
RESAMPLES = 2_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % bootstrap interval over questions."""

    value: float
    low: float
    high: float

    def shown(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ranking(scores: Sequence[float]) -> list[int]:
    """Places, best score first; equals stay in the order they came in."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])


def precision(hits: Sequence[bool], k: int) -> float:
    """Share of positives among the first k, or among all where there are fewer."""
    return sum(hits[:k]) / min(k, len(hits))


def recall(hits: Sequence[bool], k: int) -> float:
    """Share of the positives that are among the first k."""
    return sum(hits[:k]) / sum(hits)


def reciprocal_rank(hits: Sequence[bool], k: int) -> float:
    """1 / rank of the first positive, 0 if it comes after k."""
    return next((1 / rank for rank, hit in enumerate(hits[:k], start=1) if hit), 0.0)


MEASURES = {"P": precision, "R": recall, "MRR": reciprocal_rank}
NAMES = tuple(f"{name}@{k}" for k in KS for name in MEASURES)


def hits_of(row: Preference, scores: Sequence[float]) -> list[bool]:
    """The row's positives and negatives in the order of their scores: which of them are positives."""
    positives = set(row.positives)
    pool = [row.pool[place] for place in ranking([scores[place] for place in row.pool])]
    return [place in positives for place in pool]


def rank_values(rows: Sequence[Preference], scores: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """Every measure of every row. Rows must have both kinds of passages."""
    hits = [hits_of(row, values) for row, values in zip(rows, scores, strict=True)]
    return {
        f"{name}@{k}": np.array([measure(found, k) for found in hits], dtype=np.float64)
        for k in KS
        for name, measure in MEASURES.items()
    }


def estimate(values: Floats) -> Estimate:
    """The mean of per-question values; of differences between two systems on the same questions it is paired."""
    if not len(values):
        raise BadInput("there is no question to measure on.")
    low, high = np.quantile(values[_picks(len(values))].mean(axis=1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


@functools.lru_cache(maxsize=4)
def _picks(n: int) -> NDArray[np.int64]:
    """Questions drawn with replacement, the same ones for every system."""
    return np.random.default_rng(0).integers(0, n, (RESAMPLES, n))


def estimates(values: Mapping[str, Floats]) -> dict[str, Estimate]:
    return {name: estimate(found) for name, found in values.items()}
