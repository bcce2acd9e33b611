"""Vectors in memory with their row numbers: exact cosine up to half a million rows, usearch above."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.nearest import Hits, longest_row, nearest_rows, scored
from knowgate.types import Vector

EXACT_ROWS = 500_000  # exact search takes some 15 ms per 100,000 rows of 384 on two cores
GROWTH = 1.5
SPARE = 32
Hit = tuple[int, float]


class VectorIndex:
    """Unit vectors that come and go, under rising numbers. Adding copies into room kept for growth, so it is cheap."""

    def __init__(self, width: int, exact_rows: int = EXACT_ROWS):
        self._width = width
        self._exact_rows = exact_rows
        self._size = 0
        self._longest = 0.0
        self._vectors: Vector = np.empty((1024, width), dtype=np.float32)
        self._ids: NDArray[np.int64] = np.empty(1024, dtype=np.int64)
        self._graph: Any = None
        self._builder: threading.Thread | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    @property
    def width(self) -> int:
        return self._width

    def add(self, ids: Sequence[int], vectors: Vector) -> None:
        with self._lock:
            end = self._size + len(ids)
            if end > len(self._ids):
                self._grow(max(end, int(len(self._ids) * GROWTH)))
            self._ids[self._size : end] = ids
            self._vectors[self._size : end] = vectors
            self._longest = max(self._longest, longest_row(vectors))
            self._size = end
            if self._graph is not None:
                self._graph.add(np.asarray(ids, dtype=np.uint64), vectors)

    def keep(self, ids: set[int]) -> None:
        """Drop all other rows. New arrays: a graph that is being built still reads the old ones."""
        with self._lock:
            kept = np.isin(self._ids[: self._size], np.fromiter(ids, dtype=np.int64, count=len(ids)))
            self._ids, self._vectors = self._ids[: self._size][kept], self._vectors[: self._size][kept]
            self._size, self._graph = len(self._ids), None

    def nearest(self, queries: Vector, k: int) -> list[list[Hit]]:
        """(id, cosine) of the k nearest rows for each query, nearest first; equal ones in order of their ids."""
        k = min(k, self._size)
        if k == 0:
            return [[] for _ in queries]
        if self._size > self._exact_rows and self._has_graph():
            return self._approximate(queries, k)
        return self._exact(queries, k)

    def wait(self) -> None:
        """Until the graph that is being built, if any, is ready."""
        builder = self._builder  # it takes itself away when it is done
        if builder is not None:
            builder.join()

    def _has_graph(self) -> bool:
        """Whether the graph is ready. Building one takes minutes, so it goes on beside exact search."""
        if self._graph is None and self._builder is None and importlib.util.find_spec("usearch") is not None:
            self._builder = threading.Thread(target=self._build, args=(self._size,), daemon=True)
            self._builder.start()
        return self._graph is not None

    def _exact(self, queries: Vector, k: int) -> list[list[Hit]]:
        ids = self._ids[: self._size]
        return [
            _hits(ids, hits) for hits in nearest_rows(self._vectors[: self._size], queries, k, longest=self._longest)
        ]

    def _approximate(self, queries: Vector, k: int) -> list[list[Hit]]:
        """The graph names a few rows more than asked for; their cosines are not its own, which are rounded to f16."""
        ids, vectors = self._ids[: self._size], self._vectors
        keys = np.atleast_2d(self._graph.search(np.ascontiguousarray(queries), min(k + SPARE, len(ids))).keys)
        rows = [_rows_of(ids, named.astype(np.int64)) for named in keys]
        return [_hits(ids, scored(vectors, some, query).best(k)) for some, query in zip(rows, queries, strict=True)]

    def _build(self, size: int) -> None:
        from usearch.index import Index

        graph = Index(ndim=self._width, metric="ip", dtype="f16")
        ids, vectors = self._ids[:size].copy(), self._vectors
        graph.add(ids.astype(np.uint64), vectors[:size])
        with self._lock:
            if size <= self._size and np.array_equal(self._ids[:size], ids):  # else rows were dropped meanwhile
                if size < self._size:
                    graph.add(self._ids[size : self._size].astype(np.uint64), self._vectors[size : self._size])
                self._graph = graph
            self._builder = None

    def _grow(self, room: int) -> None:
        ids, vectors = np.empty(room, dtype=np.int64), np.empty((room, self._width), dtype=np.float32)
        ids[: self._size], vectors[: self._size] = self._ids[: self._size], self._vectors[: self._size]
        self._ids, self._vectors = ids, vectors


def _hits(ids: NDArray[np.int64], hits: Hits) -> list[Hit]:
    return [(int(ids[row]), float(score)) for row, score in zip(hits.rows, hits.scores, strict=True)]


def _rows_of(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rising rows of the rising ids that are wanted; one that was dropped meanwhile has none."""
    wanted = np.sort(wanted)
    rows = np.searchsorted(ids, wanted)
    known: NDArray[np.intp] = rows[ids[np.minimum(rows, len(ids) - 1)] == wanted]
    return known
