"""Vectors in memory with their row numbers: exact cosine up to half a million rows, usearch above."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types import Vector

EXACT_ROWS = 500_000  # exact search takes some 15 ms per 100,000 rows of 384 on two cores
GROWTH = 1.5
Hit = tuple[int, float]


class VectorIndex:
    """Unit vectors that come and go. Adding copies into room kept for growth, so it is cheap one by one."""

    def __init__(self, width: int, exact_rows: int = EXACT_ROWS):
        self._width = width
        self._exact_rows = exact_rows
        self._size = 0
        self._vectors: Vector = np.empty((1024, width), dtype=np.float32)
        self._ids: NDArray[np.int64] = np.empty(1024, dtype=np.int64)
        self._graph: Any = None

    def __len__(self) -> int:
        return self._size

    def add(self, ids: Sequence[int], vectors: Vector) -> None:
        end = self._size + len(ids)
        if end > len(self._ids):
            self._grow(max(end, int(len(self._ids) * GROWTH)))
        self._ids[self._size : end] = ids
        self._vectors[self._size : end] = vectors
        self._size = end
        if self._graph is not None:
            self._graph.add(np.asarray(ids, dtype=np.uint64), vectors)

    def keep(self, ids: set[int]) -> None:
        """Drop all other rows."""
        kept = np.isin(self._ids[: self._size], np.fromiter(ids, dtype=np.int64, count=len(ids)))
        count = int(kept.sum())
        self._ids[:count] = self._ids[: self._size][kept]
        self._vectors[:count] = self._vectors[: self._size][kept]
        self._size, self._graph = count, None

    def nearest(self, queries: Vector, k: int) -> list[list[Hit]]:
        """(id, cosine) of the k nearest rows for each query, nearest first; equal ones in order of their ids."""
        k = min(k, self._size)
        if k == 0:
            return [[] for _ in queries]
        if self._size > self._exact_rows and importlib.util.find_spec("usearch") is not None:
            return self._approximate(queries, k)
        return self._exact(queries, k)

    def _exact(self, queries: Vector, k: int) -> list[list[Hit]]:
        scores = queries @ self._vectors[: self._size].T
        hits = []
        for row in scores:
            top = np.argpartition(-row, k - 1)[:k] if k < self._size else np.arange(self._size)
            order = top[np.lexsort((self._ids[top], -row[top]))]
            hits.append([(int(self._ids[place]), float(row[place])) for place in order])
        return hits

    def _approximate(self, queries: Vector, k: int) -> list[list[Hit]]:
        if self._graph is None:
            self._graph = self._build()
        found = self._graph.search(np.ascontiguousarray(queries), k)
        keys, distances = np.atleast_2d(found.keys), np.atleast_2d(found.distances)
        return [
            [(int(key), 1 - float(distance)) for key, distance in zip(*pair, strict=True)]
            for pair in zip(keys, distances, strict=True)
        ]

    def _build(self) -> Any:
        from usearch.index import Index

        graph = Index(ndim=self._width, metric="ip", dtype="f16")
        graph.add(self._ids[: self._size].astype(np.uint64), self._vectors[: self._size])
        return graph

    def _grow(self, room: int) -> None:
        ids, vectors = np.empty(room, dtype=np.int64), np.empty((room, self._width), dtype=np.float32)
        ids[: self._size], vectors[: self._size] = self._ids[: self._size], self._vectors[: self._size]
        self._ids, self._vectors = ids, vectors
