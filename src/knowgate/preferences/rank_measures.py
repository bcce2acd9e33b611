"""How well passages are ordered: precision, recall and reciprocal rank at K (CBDR 4.1.4), question by question."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.preferences.record import Preference
from knowgate.statistics import Floats

KS = (1, 3, 5)


def ranking(scores: Sequence[float]) -> list[int]:
    """Places, best score first; equals stay in the order they came in."""
    return sorted(range(len(scores)), key=lambda number: -scores[number])


def precision(hits: Sequence[bool], k: int) -> float:
    """Share of positives among the first k; places that are empty because there are fewer passages count as misses."""
    return sum(hits[:k]) / k


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
    pool = [row.pool[number] for number in ranking([scores[number] for number in row.pool])]
    return [number in positives for number in pool]


def rank_values(rows: Sequence[Preference], scores: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """Every measure of every row. Rows must have both kinds of passages."""
    hits = [hits_of(row, values) for row, values in zip(rows, scores, strict=True)]
    return {
        f"{name}@{k}": np.array([measure(row_hits, k) for row_hits in hits], dtype=np.float64)
        for k in KS
        for name, measure in MEASURES.items()
    }
