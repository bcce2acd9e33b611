"""The rows with the highest inner products: the same rows, in the same order, on every machine.

A BLAS sums in an order that depends on the shape of a block, so equal vectors can get scores that differ in the last
bit. Here its product only tells which rows can be among the best: all that come within its rounding error of them.
Their scores are summed anew in double precision, row by row, and rounded to single; equal ones go by row.
Knows nothing of texts, or of where vectors are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types import Vector

BLOCK_ROWS = 16_384
BLOCK_QUERIES = 256  # 256 x 16,384 float32 scores are 16 MiB
_ROUNDOFF = 2.0**-24  # of float32
_SPARE = 4  # roundings beside those of the sum: of scores to single, of borders

RowIndices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class NearestHits:
    """Rows and their scores, best first."""

    rows: RowIndices
    scores: Vector

    def best(self, k: int) -> NearestHits:
        order = select_top_rows(self.scores, k)
        return NearestHits(self.rows[order], self.scores[order])

    def __add__(self, other: NearestHits) -> NearestHits:
        return NearestHits(np.concatenate([self.rows, other.rows]), np.concatenate([self.scores, other.scores]))


def select_top_rows(scores: NDArray[Any], k: int) -> RowIndices:
    """Indices of the k highest scores, best first; of equal scores the lower index comes first."""
    rows = _at_the_top(scores, k, 0.0)
    order = np.argsort(-scores[rows], kind="stable")
    chosen: RowIndices = rows[order[:k]]
    return chosen


def find_nearest_rows(
    vectors: Vector, queries: Vector, k: int, *, longest: float, block_rows: int = BLOCK_ROWS
) -> list[NearestHits]:
    """For each query the k rows with the highest inner products. longest: a length that no vector exceeds."""
    blocks = [queries[start : start + BLOCK_QUERIES] for start in range(0, len(queries), BLOCK_QUERIES)]
    return [hits for block in blocks for hits in _nearest(vectors, block, k, longest, block_rows)]


def score_rows(vectors: Vector, rows: RowIndices, query: Vector) -> NearestHits:
    """These rows, in rising order, with their inner products; a row's score does not depend on its company."""
    products = vectors[rows].astype(np.float64) * query.astype(np.float64)
    return NearestHits(rows, products.sum(axis=1).astype(np.float32))


def max_row_norm(vectors: Vector, *, block_rows: int = BLOCK_ROWS) -> float:
    """The greatest length of a vector; 0 of none. Reads all of them, block by block."""
    blocks = (vectors[start : start + block_rows] for start in range(0, len(vectors), block_rows))
    return max((float(np.linalg.norm(block, axis=1).max()) for block in blocks), default=0.0)


def _nearest(vectors: Vector, queries: Vector, k: int, longest: float, block_rows: int) -> list[NearestHits]:
    best = [NearestHits(np.empty(0, np.intp), np.empty(0, np.float32)) for _ in queries]
    slack = [_rounding_error(query, longest) for query in queries]
    for start in range(0, len(vectors), block_rows):
        products = queries @ vectors[start : start + block_rows].T
        rows = [start + each for each in _candidates(products, best, slack, k)]
        new = [score_rows(vectors, some, query) for some, query in zip(rows, queries, strict=True)]
        best = [(hits + more).best(k) for hits, more in zip(best, new, strict=True)]
    return best


def _candidates(products: Vector, best: list[NearestHits], slack: list[float], k: int) -> Iterator[RowIndices]:
    """Rows of a block that can be among the k best, given those of earlier blocks."""
    for scores, hits, error in zip(products, best, slack, strict=True):
        floor = float(hits.scores[-1]) - error if len(hits.scores) == k else -np.inf
        rows = np.flatnonzero(scores >= floor)
        yield rows[_at_the_top(scores[rows], k, error)]


def _at_the_top(scores: NDArray[Any], k: int, slack: float) -> RowIndices:
    """Rising indices of all scores that reach the k-th highest, or miss it by `slack`."""
    if k >= len(scores):
        return np.arange(len(scores))
    border = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= border - slack)


def _rounding_error(query: Vector, longest: float) -> float:
    """Twice what a sum of products in single precision can be off, whatever its order (Higham 2002, section 3.1)."""
    length = float(np.linalg.norm(query.astype(np.float64)))
    return 2 * (len(query) + _SPARE) * _ROUNDOFF * length * longest
