"""Search by meaning: the passages whose vectors have the highest inner product with the query's.

Exact, block by block over a memory map, so memory stays flat. Above `ANN_ROWS` rows an inverted file of faiss
stands beside the vectors if it was built (see `ann.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from knowgate.embedding import check_vectors
from knowgate.errors import ModelError
from knowgate.retrieval.ranking import best_rows, check_k
from knowgate.types import Embedder, Passage, Vector

_BLOCK_ROWS = 16_384
_BLOCK_QUERIES = 256  # 256 x 16,384 float32 scores are 16 MiB


class RowSearch(Protocol):
    """Finds the rows nearest to each query vector."""

    def nearest(self, queries: Vector, k: int) -> list[Hits]: ...


@dataclass(frozen=True, eq=False)
class Hits:
    """Rows and their scores, best first."""

    rows: NDArray[np.intp]
    scores: Vector

    def best(self, k: int) -> Hits:
        order = best_rows(self.scores, k)
        return Hits(self.rows[order], self.scores[order])

    def __add__(self, other: Hits) -> Hits:
        return Hits(np.concatenate([self.rows, other.rows]), np.concatenate([self.scores, other.scores]))


class ExactSearch:
    """Looks at every row."""

    def __init__(self, vectors: Vector, *, block_rows: int = _BLOCK_ROWS):
        self._vectors = vectors
        self._block_rows = block_rows

    def nearest(self, queries: Vector, k: int) -> list[Hits]:
        blocks = [queries[start : start + _BLOCK_QUERIES] for start in range(0, len(queries), _BLOCK_QUERIES)]
        return [hits for block in blocks for hits in self._nearest(block, k)]

    def _nearest(self, queries: Vector, k: int) -> list[Hits]:
        best = [Hits(np.empty(0, np.intp), np.empty(0, np.float32)) for _ in queries]
        for start in range(0, len(self._vectors), self._block_rows):
            scores = queries @ self._vectors[start : start + self._block_rows].T
            rows = np.arange(start, start + scores.shape[1])
            best = [(hits + Hits(rows, row).best(k)).best(k) for hits, row in zip(best, scores, strict=True)]
        return best


class DenseRetriever:
    """Always returns k passages where there are k, however far off they are."""

    name = "dense"

    def __init__(
        self,
        search: RowSearch,
        passages: Sequence[Passage],
        *,
        embedder: Embedder,
        width: int,
        fingerprint: str,
    ):
        self._rows = search
        self._passages = passages
        self._embedder = embedder
        self._width = width
        self.fingerprint = fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        if not queries:
            return []
        vectors = check_vectors(self._embedder.embed(queries), len(queries))
        if vectors.shape[1] != self._width:
            raise ModelError(
                f"the embedding model gives {vectors.shape[1]} numbers a text, the index holds {self._width}."
            )
        return [self._passages_of(hits) for hits in self._rows.nearest(vectors, k)]

    def _passages_of(self, hits: Hits) -> list[Passage]:
        found = zip(hits.rows, hits.scores, strict=True)
        return [replace(self._passages[int(row)], score=float(score)) for row, score in found]
