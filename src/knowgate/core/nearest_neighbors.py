"""Exact nearest neighbors by inner product, with the same rows in the same order on every machine.

The matrix products of BLAS round differently on different machines and for different block sizes, so equal vectors can
get scores that differ in the last bit. Matrix products are therefore used only to select candidates: all rows whose
scores are within the rounding error of the best ones. The scores of the candidates are then computed again, row by row
in double precision, and rounded to single precision. Rows with equal scores are sorted by row number.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types import Vector

BLOCK_ROWS = 16_384  # rows that are multiplied at once
BLOCK_QUERIES = 256  # 256 x 16,384 float32 scores are 16 MiB
_FLOAT32_ROUNDOFF = 2.0**-24
_EXTRA_ROUNDINGS = 4  # roundings besides those of the sum: scores to single precision, and bounds
_TRAINING_ROWS_PER_LIST = 64  # the k-means of faiss recommends 39 to 256 training vectors per list

RowIndices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class NearestHits:
    """Row numbers and scores of the hits for one query. Only the hits that `top` returns are sorted."""

    rows: RowIndices  # row numbers of the found vectors
    scores: Vector  # their similarity to the query

    def top(self, k: int) -> NearestHits:
        """Return the k best hits, best first."""
        order = select_top_rows(self.scores, k)
        return NearestHits(self.rows[order], self.scores[order])

    def merge(self, other: NearestHits) -> NearestHits:
        """Return the hits of both objects, not sorted."""
        return NearestHits(np.concatenate([self.rows, other.rows]), np.concatenate([self.scores, other.scores]))


def select_top_rows(scores: NDArray[Any], k: int) -> RowIndices:
    """Return the indices of the k highest scores, best first. Equal scores are sorted by index."""
    rows = _select_near_top(scores, k, 0.0)
    order = np.argsort(-scores[rows], kind="stable")
    top: RowIndices = rows[order[:k]]
    return top


def find_nearest_rows(
    vectors: Vector, queries: Vector, k: int, *, max_norm: float, block_rows: int = BLOCK_ROWS
) -> list[NearestHits]:
    """Find for each query the k rows with the highest inner products.

    Args:
        vectors: Rows to search.
        queries: One query per row.
        k: Number of hits per query.
        max_norm: The largest norm of a vector, from which the largest possible rounding error is computed.
        block_rows: Number of rows that are multiplied at once.
    """
    results: list[NearestHits] = []
    for start in range(0, len(queries), BLOCK_QUERIES):
        results += _search_block(vectors, queries[start : start + BLOCK_QUERIES], k, max_norm, block_rows)
    return results


def score_rows(vectors: Vector, rows: RowIndices, query: Vector) -> NearestHits:
    """Compute the inner products of the query with some rows.

    The score of a row does not depend on the other rows, not even in its last digit.
    """
    # Not `vectors[rows] @ query`, because a matrix product may round a row differently if there are more or fewer rows.
    products = vectors[rows].astype(np.float64) * query.astype(np.float64)
    return NearestHits(rows, products.sum(axis=1).astype(np.float32))


def max_row_norm(vectors: Vector, *, block_rows: int = BLOCK_ROWS) -> float:
    """Return the largest norm of a row, or 0 without rows."""
    blocks = (vectors[start : start + block_rows] for start in range(0, len(vectors), block_rows))
    return max((float(np.linalg.norm(block, axis=1).max()) for block in blocks), default=0.0)


def _search_block(vectors: Vector, queries: Vector, k: int, max_norm: float, block_rows: int) -> list[NearestHits]:
    """Find the k best rows for each query, block by block.

    A fast product of matrices selects candidates. It has rounding errors, so rows that come close to the best ones are
    candidates, too. Exact scores then rank the candidates.
    """
    best = [NearestHits(np.empty(0, np.intp), np.empty(0, np.float32)) for _ in queries]
    max_errors = [_bound_rounding_error(query, max_norm) for query in queries]
    for start in range(0, len(vectors), block_rows):
        products = queries @ vectors[start : start + block_rows].T
        for i, query in enumerate(queries):
            rows = start + _select_candidates(products[i], best[i], max_errors[i], k)
            candidates = score_rows(vectors, rows, query)
            best[i] = best[i].merge(candidates).top(k)
    return best


def _select_candidates(scores: Vector, best: NearestHits, error: float, k: int) -> RowIndices:
    """Return the rows of a block with a chance to reach the top k.

    Args:
        scores: Inner product of the query with each row of the block, with rounding errors.
        best: The best hits in earlier blocks.
        error: Bound of the rounding error.
        k: Number of hits to find.
    """
    # A row that scores less than (k-th best score so far - rounding error) cannot be among the k best.
    min_score = float(best.scores[-1]) - error if len(best.scores) == k else -np.inf
    rows = np.flatnonzero(scores >= min_score)
    return rows[_select_near_top(scores[rows], k, error)]


def _select_near_top(scores: NDArray[Any], k: int, slack: float) -> RowIndices:
    """Return the indices of scores at most `slack` below the k-th highest."""
    if k >= len(scores):
        return np.arange(len(scores))
    kth = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= kth - slack)


def _bound_rounding_error(query: Vector, max_norm: float) -> float:
    """Return the maximum rounding error when two inner products are compared. See Higham 2002, section 3.1.

    Args:
        query: The query.
        max_norm: The largest norm of a vector that it is multiplied with.
    """
    norm = float(np.linalg.norm(query.astype(np.float64)))
    return 2 * (len(query) + _EXTRA_ROUNDINGS) * _FLOAT32_ROUNDOFF * norm * max_norm


# --- approximate search with faiss ----------------------------------------------------------------


def has_faiss() -> bool:
    """Return whether the package faiss is installed."""
    return importlib.util.find_spec("faiss") is not None


def train_ann_index(vectors: Vector, lists: int) -> Any:
    """Create an empty faiss index for approximate search. A search reads only the nearest lists of similar vectors.

    Args:
        vectors: The vectors that will be added later.
        lists: Number of lists.
    """
    import faiss

    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    n_training_rows = _TRAINING_ROWS_PER_LIST * lists
    step = max(1, len(vectors) // n_training_rows)  # every `step`-th vector is used
    index.train(np.ascontiguousarray(vectors[::step]))
    return index
