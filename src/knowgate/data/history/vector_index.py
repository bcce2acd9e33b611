"""Vectors with their row numbers: exact cosine up to a hundred thousand rows, above that the lists near a question.

Lists are made in the background and kept beside the log; until they are there, search is exact. Rows that came since
are compared exactly, and put into the lists when they are many. Knows rows and files; not the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import file_lock
from knowgate.core.nearest_neighbors import NearestHits, find_nearest_rows, max_row_norm
from knowgate.data.history.inverted_file import VectorRows, open_inverted_file, write_inverted_file
from knowgate.types import Vector

log = logging.getLogger(__name__)
EXACT_SEARCH_ROWS = 100_000  # exact search takes some 15 ms per 100,000 rows of 384 on two cores
LOCK_FILE = ".lock"  # held by who writes lists, or wipes rows in them
FRESH_ROWS = 20_000  # beside the lists, before they are put into them
GROWTH = 1.5
Hit = tuple[int, float]


@dataclass(frozen=True)
class IndexLocation:
    """Where lists are kept, and whose they are."""

    folder: Path
    name: str
    stamp: str


class VectorIndex:
    """Unit vectors that come and go, under rising numbers. Adding copies into room kept for growth, so it is cheap.

    place: for lists; without one, search is always exact. exact_rows, fresh_rows: how many are searched so.
    """

    def __init__(
        self,
        width: int,
        exact_rows: int = EXACT_SEARCH_ROWS,
        *,
        place: IndexLocation | None = None,
        fresh_rows: int = FRESH_ROWS,
    ):
        self._width = width
        self._exact_rows = exact_rows
        self._fresh_rows = fresh_rows
        self._place = place
        self._size = 0
        self._longest = 0.0
        self._vectors: Vector = np.empty((0, width), dtype=np.float32)
        self._ids: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._lists = open_inverted_file(place.folder, place.name, width, place.stamp) if place else None
        self._builder: threading.Thread | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size + (len(self._lists) if self._lists else 0)

    @property
    def width(self) -> int:
        return self._width

    @property
    def listed(self) -> int:
        """The highest number in the lists: rows up to it need not be added. -1 where there are none."""
        return self._lists.record.last if self._lists else -1

    def reserve(self, rows: int) -> None:
        """Room for so many more, so that adding them copies nothing."""
        with self._lock:
            if self._size + rows > len(self._ids):
                self._grow(self._size + rows)

    def add(self, ids: Sequence[int], vectors: Vector) -> None:
        with self._lock:
            end = self._size + len(ids)
            if end > len(self._ids):
                self._grow(max(1024, end, int(len(self._ids) * GROWTH)))
            self._ids[self._size : end] = ids
            self._vectors[self._size : end] = vectors
            self._longest = max(self._longest, max_row_norm(vectors))
            self._size = end

    def keep(self, ids: set[int]) -> None:
        """Drop all other rows that are not in lists; of those, what is gone is known to who looks it up.

        New arrays: lists that are being made still read the old ones.
        """
        with self._lock:
            kept = np.isin(self._ids[: self._size], np.fromiter(ids, dtype=np.int64, count=len(ids)))
            self._ids, self._vectors = self._ids[: self._size][kept], self._vectors[: self._size][kept]
            self._size = len(self._ids)

    def nearest(self, queries: Vector, k: int) -> list[list[Hit]]:
        """(id, cosine) of the k nearest rows for each query, nearest first; equal ones in order of their ids."""
        k = min(k, len(self))
        if k == 0:
            return [[] for _ in queries]
        self._make_lists()
        with self._lock:
            lists, ids, vectors = self._lists, self._ids[: self._size], self._vectors[: self._size]
        fresh = [_hits(ids, hits) for hits in find_nearest_rows(vectors, queries, k, max_norm=self._longest)]
        if lists is None:
            return fresh
        return [_best(near + lists.nearest(query, k), k) for near, query in zip(fresh, queries, strict=True)]

    def wait(self) -> None:
        """Until the lists that are being made, if any, are ready."""
        builder = self._builder  # it takes itself away when it is done
        if builder is not None:
            builder.join()

    def _make_lists(self) -> None:
        """Begin to, if there is need. It takes a minute or so for a million rows, beside exact search."""
        if self._place is None or self._builder is not None or not self._has_many():
            return
        self._builder = threading.Thread(target=self._build, args=(self._place,), daemon=True)
        self._builder.start()

    def _has_many(self) -> bool:
        return self._size > (self._exact_rows if self._lists is None else self._fresh_rows)

    def _build(self, place: IndexLocation) -> None:
        try:
            self._open(place)  # another process may have made them
            if self._has_many():
                with file_lock(place.folder / LOCK_FILE, wait=False):
                    self._write(place)
        except BlockingIOError:
            pass  # another process is at it: its lists are opened when they are there
        except OSError as error:
            log.warning("cannot keep lists of vectors in %s (%s): search stays exact", place.folder, error)
            self._place = None
        finally:
            self._open(place)
            self._builder = None

    def _write(self, place: IndexLocation) -> None:
        there = open_inverted_file(place.folder, place.name, self._width, place.stamp)
        with self._lock:
            ids, vectors = self._ids[: self._size], self._vectors[: self._size]
        new = ids > (there.record.last if there else -1)
        first = int(np.argmax(new)) if new.any() else len(ids)
        sources = [VectorRows(ids[first:], vectors[first:])]
        write_inverted_file(
            place.folder, place.name, place.stamp, [there.rows(), *sources] if there else sources, there
        )

    def _open(self, place: IndexLocation) -> None:
        """Read the lists there are, and let go of the rows that are in them."""
        lists = open_inverted_file(place.folder, place.name, self._width, place.stamp)
        if lists is None or lists.record.last <= self.listed:
            return
        with self._lock:
            fresh = self._ids[: self._size] > lists.record.last
            self._ids, self._vectors = self._ids[: self._size][fresh], self._vectors[: self._size][fresh]
            self._size, self._lists = len(self._ids), lists

    def _grow(self, room: int) -> None:
        ids, vectors = np.empty(room, dtype=np.int64), np.empty((room, self._width), dtype=np.float32)
        ids[: self._size], vectors[: self._size] = self._ids[: self._size], self._vectors[: self._size]
        self._ids, self._vectors = ids, vectors


def _hits(ids: NDArray[np.int64], hits: NearestHits) -> list[Hit]:
    return [(int(ids[row]), float(score)) for row, score in zip(hits.rows, hits.scores, strict=True)]


def _best(hits: list[Hit], k: int) -> list[Hit]:
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k]
