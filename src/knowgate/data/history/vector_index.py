"""Nearest vectors by row id: exact up to 100,000 rows, beyond that an approximate index of faiss (extra `faiss`).

The faiss index is built in the background and stored in a folder next to the log. Search is exact without faiss, and
until that index is ready. Rows that were added after it was built are searched exactly, until there are so many that
they are moved into the faiss index.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import file_lock, write_json
from knowgate.core.nearest_neighbors import (
    NearestHits,
    find_nearest_rows,
    has_faiss,
    max_row_norm,
    score_rows,
    train_ann_index,
)
from knowgate.core.schema import read_record
from knowgate.core.validation import check_regular_file, read_json
from knowgate.errors import BadInput
from knowgate.types import Vector

log = logging.getLogger(__name__)
# A faiss index is built for more rows than this. Exact search takes about 15 ms per 100,000 rows of 384 numbers.
EXACT_SEARCH_ROWS = 100_000
FRESH_ROWS = 20_000  # rows searched exactly beside the faiss index before they are moved into it
GROWTH_FACTOR = 1.5  # arrays that are full are replaced by ones this many times larger
MIN_PROBED_ROWS = 16_384  # rows compared per query: 25 MB of 384 numbers each, read in a few milliseconds
EXTRA_RESCORED = 32  # rows scored exactly in addition to those requested
LOCK_FILE = ".lock"
RowIds = NDArray[np.int64]
Hit = tuple[int, float]


@dataclass(frozen=True)
class IndexLocation:
    """Where a faiss index is stored.

    Attributes:
        folder: Folder of the files.
        name: Prefix of the file names.
        stamp: Identifies the log of questions whose vectors are indexed. An index with another stamp is ignored.
    """

    folder: Path
    name: str
    stamp: str

    @property
    def manifest_file(self) -> Path:
        """The JSON file that describes the current index."""
        return self.folder / f"{self.name}.json"

    def index_file(self, token: str) -> Path:
        """Return the file of the faiss index with this token, which is new for every version of the index."""
        return self.folder / f"{self.name}-{token}.faiss"


@dataclass(frozen=True)
class AnnManifest:
    """Describes a stored faiss index of the question vectors of a log.

    Attributes:
        token: Part of the file name, new for every version of the index.
        stamp: Stamp of the log whose questions are indexed. It tells logs apart.
        last: Highest row id that was ever added, even if the row was deleted later. Ids are never used again.
        size: Size of the file in bytes.
    """

    token: str
    stamp: str
    last: int
    size: int


@dataclass(frozen=True, eq=False)
class AnnIndex:
    """An approximate faiss index (IVF-Flat). Each row has an id."""

    manifest: AnnManifest  # describes the stored file
    index: Any = field(repr=False)  # the index of faiss

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def nearest(self, query: Vector, k: int) -> list[Hit]:
        """Return the row id and cosine similarity of the k nearest rows.

        The candidates from faiss are scored again, exactly.
        """
        faiss = _import_faiss()
        # faiss stores similar rows in one list, and searches the lists that are most similar to the query.
        rows_per_list = max(1, len(self) // self.index.nlist)
        n_lists = math.ceil(max(MIN_PROBED_ROWS, 4 * k) / rows_per_list)
        parameters = faiss.SearchParametersIVF(nprobe=min(self.index.nlist, n_lists))
        n_candidates = min(k + EXTRA_RESCORED, len(self))
        _, id_rows, vector_rows = self.index.search_and_reconstruct(query[None], n_candidates, params=parameters)
        ids, vectors = id_rows[0], vector_rows[0]  # there is only one query
        # Sorted by id, because of rows with equal scores, the lower id comes first, as in exact search.
        order = np.argsort(ids, kind="stable")
        order = order[ids[order] >= 0]  # if faiss finds too few rows, it fills the result with the id -1
        sorted_ids, sorted_vectors = ids[order], np.ascontiguousarray(vectors[order])
        return _make_hits(sorted_ids, score_rows(sorted_vectors, np.arange(len(sorted_ids)), query).top(k))


def _import_faiss() -> Any:
    """Import faiss as an untyped module. Its type hints lack many overloads."""
    import faiss

    return faiss


def open_ann_index(location: IndexLocation, width: int) -> AnnIndex | None:
    """Open the stored faiss index of a log, without reading it into memory. Return None if it cannot be used."""
    if not has_faiss():
        return None
    faiss = _import_faiss()
    try:
        manifest = _read_manifest(location.manifest_file)
        if manifest.stamp != location.stamp or not manifest.token.isalnum():
            return None  # it belongs to another log
        path = location.index_file(manifest.token)
        check_regular_file(path)
        if path.stat().st_size != manifest.size:
            return None  # it is incomplete
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except (BadInput, OSError, ValueError, RuntimeError):
        return None
    return AnnIndex(manifest, index) if index.d == width else None


def _read_manifest(file: Path) -> AnnManifest:
    """Read the description of a stored faiss index."""
    return read_record(AnnManifest, read_json(file), file.name, ignore_unknown=True)


def write_ann_index(location: IndexLocation, ids: RowIds, vectors: Vector, old: AnnIndex | None = None) -> None:
    """Store a new version of the faiss index, with the old and the new rows.

    Args:
        location: Where to store it. The older file is not changed, so other processes can still read it.
        ids: Ids of the new rows.
        vectors: Vectors of the new rows.
        old: Older index; None if there is none.
    """
    if old is None:
        index = train_ann_index(vectors, lists=max(1, round(2 * len(vectors) ** 0.5)))
    else:
        index = _import_faiss().read_index(str(location.index_file(old.manifest.token)))
    index.add_with_ids(np.ascontiguousarray(vectors), np.ascontiguousarray(ids))
    last = int(ids.max(initial=old.manifest.last if old else 0))
    _store(location, index, last)


def _store(location: IndexLocation, index: Any, last: int) -> None:
    """Write the index under a new token, then the manifest. Then remove older files.

    Args:
        location: Where to store it.
        index: The faiss index.
        last: Highest id that the index has had.
    """
    token = uuid.uuid4().hex
    path = location.index_file(token)
    location.folder.mkdir(parents=True, exist_ok=True)
    try:
        _import_faiss().write_index(index, str(path))
    except RuntimeError as error:  # how faiss reports a full disk or a missing permission
        raise OSError(str(error)) from None
    manifest = AnnManifest(token, location.stamp, last, path.stat().st_size)
    write_json(location.manifest_file, vars(manifest))
    _remove_older_files(location, path)


def _remove_older_files(location: IndexLocation, newest: Path) -> None:
    """Remove all index files of a log except the newest."""
    for file in location.folder.glob(f"{location.name}-*"):
        if file != newest:
            with contextlib.suppress(OSError):  # some systems cannot remove a file that is mapped
                file.unlink()


def erase_rows(folder: Path, ids: Sequence[int]) -> None:
    """Remove rows from all stored indexes of a folder. Deleted questions leave no vectors on disk."""
    for file in folder.glob("*.npy"):  # indexes that earlier versions of knowgate wrote
        file.unlink()
    if not has_faiss():
        return
    for manifest_file in folder.glob("*.json"):
        # An index that cannot be read is never used, and is replaced when the log is next searched.
        with contextlib.suppress(BadInput, OSError, ValueError, RuntimeError):
            manifest = _read_manifest(manifest_file)
            location = IndexLocation(folder, manifest_file.stem, manifest.stamp)
            index = _import_faiss().read_index(str(location.index_file(manifest.token)))
            if index.remove_ids(np.asarray(ids, dtype=np.int64)):
                _store(location, index, manifest.last)


class VectorIndex:
    """Finds the nearest vectors.

    Few rows are searched exactly, and many with a faiss index on disk. New rows stay in memory until a thread moves
    them into the faiss index.

    Args:
        width: Length of a vector.
        location: Where to store the faiss index; None for exact search only.
    """

    def __init__(self, width: int, location: IndexLocation | None = None):
        self.width = width
        self._location = location if has_faiss() else None
        self._size = 0
        self._max_norm = 0.0
        self._vectors: Vector = np.empty((0, width), dtype=np.float32)
        self._ids: RowIds = np.empty(0, dtype=np.int64)
        self._ann = open_ann_index(self._location, width) if self._location else None
        self._builder: threading.Thread | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size + (len(self._ann) if self._ann else 0)

    @property
    def last_indexed_id(self) -> int:
        """Highest row id in the faiss index; -1 if there is no such index. Rows with higher ids are in memory."""
        return self._ann.manifest.last if self._ann else -1

    @property
    def last_id(self) -> int:
        """Highest id of all rows; -1 if there are none."""
        return int(self._ids[self._size - 1]) if self._size else self.last_indexed_id

    def reserve(self, rows: int) -> None:
        """Allocate memory for more rows, so that adding them copies nothing."""
        with self._lock:
            if self._size + rows > len(self._ids):
                self._allocate(self._size + rows)

    def add(self, ids: Sequence[int], vectors: Vector) -> None:
        """Add rows with ascending ids."""
        with self._lock:
            end = self._size + len(ids)
            if end > len(self._ids):
                self._allocate(max(1024, end, int(len(self._ids) * GROWTH_FACTOR)))
            self._ids[self._size : end] = ids
            self._vectors[self._size : end] = vectors
            self._max_norm = max(self._max_norm, max_row_norm(vectors))
            self._size = end

    def keep_in_memory(self, ids: set[int]) -> None:
        """Drop all rows from memory except those with these ids. Rows in the faiss index are not affected."""
        with self._lock:
            self._keep_rows(np.isin(self._ids[: self._size], list(ids)))

    def nearest(self, queries: Vector, k: int) -> list[list[Hit]]:
        """Return the row id and cosine similarity of the k rows nearest to each query."""
        k = min(k, len(self))
        if k == 0:
            return [[] for _ in queries]
        self._start_builder()
        with self._lock:
            ann = self._ann
            ids, vectors = self._get_rows()
        # Rows in memory, which are not in the faiss index (`ann`), are searched exactly. Then both results are merged.
        exact = [_make_hits(ids, hits) for hits in find_nearest_rows(vectors, queries, k, max_norm=self._max_norm)]
        if ann is None:
            return exact
        merged = [hits + ann.nearest(query, k) for hits, query in zip(exact, queries, strict=True)]
        return [sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k] for hits in merged]  # by similarity, then by id

    def _start_builder(self) -> None:
        """Build the faiss index in a thread if there are enough rows."""
        if self._location is None or self._builder is not None or not self._has_many_rows():
            return
        self._builder = threading.Thread(target=self._build, args=(self._location,), daemon=True)
        self._builder.start()

    def _has_many_rows(self) -> bool:
        """Whether memory holds so many rows that they should move into the faiss index."""
        return self._size > (EXACT_SEARCH_ROWS if self._ann is None else FRESH_ROWS)

    def _build(self, location: IndexLocation) -> None:
        """Build the faiss index on disk, or add the rows in memory to it. Another process may be faster."""
        try:
            self._reopen(location)  # another process may have built it
            if self._has_many_rows():
                location.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, like the log
                with file_lock(location.folder / LOCK_FILE, wait=False):
                    self._write(location)
        except BlockingIOError:
            pass  # another process is building; its index is opened when it is ready
        except OSError as error:
            log.warning("cannot store a faiss index in %s (%s), so searches are slower", location.folder, error)
            self._location = None
        finally:
            self._reopen(location)
            self._builder = None

    def _write(self, location: IndexLocation) -> None:
        """Write a new version of the faiss index, with the rows in memory added."""
        stored = open_ann_index(location, self.width)
        with self._lock:
            ids, vectors = self._get_rows()
        first = int(np.searchsorted(ids, stored.manifest.last, side="right")) if stored else 0
        write_ann_index(location, ids[first:], vectors[first:], stored)

    def _reopen(self, location: IndexLocation) -> None:
        """Open the index on disk if it is newer. Rows in the index are dropped from memory."""
        ann = open_ann_index(location, self.width)
        if ann is None or ann.manifest.last <= self.last_indexed_id:
            return
        with self._lock:
            self._keep_rows(self._ids[: self._size] > ann.manifest.last)  # larger ids are not in the index
            self._ann = ann

    def _get_rows(self) -> tuple[RowIds, Vector]:
        """Return the ids and vectors of the rows in memory, without the part of the arrays that is not in use."""
        return self._ids[: self._size], self._vectors[: self._size]

    def _keep_rows(self, is_kept: NDArray[np.bool_]) -> None:
        """Keep only the rows in memory with True in the mask."""
        ids, vectors = self._get_rows()
        self._ids = ids[is_kept]
        self._vectors = vectors[is_kept]
        self._size = len(self._ids)

    def _allocate(self, n_rows: int) -> None:
        """Move the rows into arrays with more room."""
        ids, vectors = self._get_rows()
        self._ids = np.empty(n_rows, dtype=np.int64)
        self._vectors = np.empty((n_rows, self.width), dtype=np.float32)
        self._ids[: self._size] = ids
        self._vectors[: self._size] = vectors


def _make_hits(ids: RowIds, hits: NearestHits) -> list[Hit]:
    """Replace the row numbers of hits by the ids of the rows."""
    return [(int(ids[row]), float(score)) for row, score in zip(hits.rows, hits.scores, strict=True)]
