"""Search by meaning: the passages whose vectors have the highest inner product with the query's.

Exact, block by block over a memory map, so memory stays flat; equal scores go by row, whatever the blocks (see
`knowgate.nearest`). Above `ANN_ROWS` rows an inverted file of faiss stands beside the vectors if it was built (see
`ann.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from knowgate.embedding import check_vectors
from knowgate.errors import ModelError
from knowgate.nearest import BLOCK_ROWS, Hits, longest_row, nearest_rows
from knowgate.retrieval.ranking import check_k
from knowgate.types import Embedder, Passage, Vector


class RowSearch(Protocol):
    """Finds the rows nearest to each query vector."""

    def nearest(self, queries: Vector, k: int) -> list[Hits]: ...


class ExactSearch:
    """Looks at every row."""

    def __init__(self, vectors: Vector, *, block_rows: int = BLOCK_ROWS):
        self._vectors = vectors
        self._block_rows = block_rows

    def nearest(self, queries: Vector, k: int) -> list[Hits]:
        return nearest_rows(self._vectors, queries, k, longest=self._longest, block_rows=self._block_rows)

    @cached_property
    def _longest(self) -> float:
        return longest_row(self._vectors, block_rows=self._block_rows)


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
