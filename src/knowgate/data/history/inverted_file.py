"""Vectors grouped by the centre they are nearest to, in files that are mapped: a search reads a few groups only.

An inverted file (Jegou et al. 2011, section IV, without the compression): centres by k-means on a sample, every row in
the list of its centre, the lists one after another in a file. More rows are put into the lists there are; centres are
sought anew only when there are four times as many rows. Knows arrays and files; not where the rows come from.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import write_json
from knowgate.core.nearest_neighbors import NearestHits, score_rows, select_top_rows
from knowgate.core.schema import read_record
from knowgate.core.validation import check_regular_file, read_json
from knowgate.errors import BadInput
from knowgate.types import Vector

MIN_PROBED_ROWS = (
    16_384  # rows looked at for a question, at least: 25 MB of 384 numbers each, read in a few milliseconds
)
EXTRA_RESCORED = 32  # rows whose scores are summed anew beyond those asked for
SAMPLES_PER_CENTROID = 32  # rows per centre that k-means sees
KMEANS_ROUNDS = 6
BLOCK_ROWS = 8_192
RETRAIN_FACTOR = 4.0  # times as many rows as there were when the centres were found
DELETED_ID = -1  # in place of a row's number: it was wiped
RowIds = NDArray[np.int64]


@dataclass(frozen=True)
class InvertedFileManifest:
    """What is written beside the arrays: their file names begin with `token`. stamp: whose rows they are."""

    token: str
    stamp: str
    width: int
    rows: int
    trained: int
    last: int


@dataclass(frozen=True, eq=False)
class VectorRows:
    """Rows to be put into lists; labels: the list of each, where that is known."""

    ids: RowIds
    vectors: Vector
    labels: NDArray[np.intp] | None = None


@dataclass(frozen=True, eq=False)
class InvertedFile:
    """Rows by list: those of list i are `starts[i] : starts[i + 1]`."""

    record: InvertedFileManifest
    centres: Vector
    starts: RowIds
    ids: RowIds
    vectors: Vector

    def __len__(self) -> int:
        return self.record.rows

    def nearest(self, query: Vector, k: int) -> list[tuple[int, float]]:
        """(id, cosine), nearest first, from the lists nearest to the query; as many lists as make `PROBED` rows."""
        order = np.argsort(-_products(self.centres, query), kind="stable")
        reach = np.cumsum(np.diff(self.starts)[order])
        chosen = order[: int(np.searchsorted(reach, max(MIN_PROBED_ROWS, 4 * k))) + 1]
        spans = [(int(self.starts[i]), int(self.starts[i + 1])) for i in chosen]
        scores = np.concatenate([_products(self.vectors[start:end], query) for start, end in spans])
        rows = np.concatenate([np.arange(start, end) for start, end in spans])
        best = np.sort(rows[select_top_rows(scores, min(len(scores), k + EXTRA_RESCORED))])
        hits: NearestHits = score_rows(self.vectors, best[self.ids[best] != DELETED_ID], query).top(k)
        return [(int(self.ids[row]), float(score)) for row, score in zip(hits.rows, hits.scores, strict=True)]

    def rows(self) -> VectorRows:
        """As they are, in their lists."""
        return VectorRows(self.ids, self.vectors, np.repeat(np.arange(len(self.centres)), np.diff(self.starts)))


def _products(vectors: Vector, query: Vector) -> Vector:
    """In one thread: a BLAS wakes several for so little, and they wait for each other on a busy machine."""
    products: Vector = np.einsum("ij,j->i", vectors, query)
    return products


def open_inverted_file(folder: Path, name: str, width: int, stamp: str) -> InvertedFile | None:
    """None where there are none, or none of this stamp; damaged ones are as good as none: they can be made again."""
    try:
        record = read_record(InvertedFileManifest, read_json(folder / f"{name}.json"), name)
        if (record.stamp, record.width) != (stamp, width) or not record.token.isalnum():
            return None
        arrays = [_mapped(_file(folder, name, record.token, part)) for part in ("centres", "starts", "ids", "vectors")]
    except (BadInput, OSError, ValueError):
        return None
    centres, starts, ids, vectors = arrays
    lists = InvertedFile(record, np.array(centres), np.array(starts), ids.view(np.ndarray), vectors.view(np.ndarray))
    return lists if _fits(lists) else None


def _fits(lists: InvertedFile) -> bool:
    n, width, starts = lists.record.rows, lists.record.width, lists.starts
    return (
        lists.vectors.shape == (n, width)
        and lists.ids.shape == (n,)
        and lists.centres.shape == (len(starts) - 1, width)
        and bool(np.isfinite(lists.centres).all())
        and (int(starts[0]), int(starts[-1])) == (0, n)
        and bool((np.diff(starts) >= 0).all())
    )


def write_inverted_file(
    folder: Path, name: str, stamp: str, sources: Sequence[VectorRows], old: InvertedFile | None = None
) -> None:
    """Put all rows into lists of their own files; whoever reads older ones goes on reading them. Rows wiped are left
    out. old: whose centres are kept, unless there are too many rows for them by now."""
    total = sum(len(rows.ids) for rows in sources)
    keeps = old is not None and total < RETRAIN_FACTOR * old.record.trained
    centres = old.centres if old is not None and keeps else _centres(sources, total)
    labels = [rows.labels if keeps and rows.labels is not None else _assign(rows.vectors, centres) for rows in sources]
    labels = [some[rows.ids != DELETED_ID] for some, rows in zip(labels, sources, strict=True)]
    starts = np.concatenate([[0], np.cumsum(np.bincount(np.concatenate(labels), minlength=len(centres)))])
    trained = old.record.trained if old is not None and keeps else total
    last = max((int(rows.ids.max()) for rows in sources if len(rows.ids)), default=0)
    record = InvertedFileManifest(uuid.uuid4().hex, stamp, centres.shape[1], int(starts[-1]), trained, last)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(_file(folder, name, record.token, "centres"), centres)
    np.save(_file(folder, name, record.token, "starts"), starts.astype(np.int64))
    _write_rows(folder, name, record, sources, labels)
    write_json(folder / f"{name}.json", vars(record))
    _clear(folder, name, record.token)


def erase_rows(folder: Path, ids: Sequence[int]) -> None:
    """Take rows out of all lists of a folder, numbers and vectors, in place."""
    gone = np.asarray(ids, dtype=np.int64)
    for path in folder.glob("*.ids.npy") if len(gone) else ():
        with contextlib.suppress(BadInput, OSError, ValueError):
            numbers, vectors = _mapped(path, "r+"), _mapped(path.with_suffix("").with_suffix(".vectors.npy"), "r+")
            rows = np.flatnonzero(np.isin(numbers, gone))
            numbers[rows], vectors[rows] = DELETED_ID, 0.0
            numbers.flush()
            vectors.flush()


def _file(folder: Path, name: str, token: str, part: str) -> Path:
    return folder / f"{name}-{token}.{part}.npy"


def _mapped(path: Path, mode: Any = "r") -> Any:
    check_regular_file(path)
    return np.load(path, mmap_mode=mode, allow_pickle=False)


def _clear(folder: Path, name: str, token: str) -> None:
    for path in folder.glob(f"{name}-*.npy"):
        if not path.name.startswith(f"{name}-{token}."):
            with contextlib.suppress(OSError):  # mapped by somebody, where the system does not allow it
                path.unlink()


def _write_rows(
    folder: Path,
    name: str,
    record: InvertedFileManifest,
    sources: Sequence[VectorRows],
    labels: Sequence[NDArray[np.intp]],
) -> None:
    """One list after another, written as they come: a file that is mapped while it is written counts as memory."""
    kept = [np.flatnonzero(rows.ids != DELETED_ID) for rows in sources]
    order = np.argsort(np.concatenate(labels), kind="stable")
    ends = np.cumsum([len(some) for some in kept])
    ids = np.concatenate([rows.ids[some] for rows, some in zip(sources, kept, strict=True)])
    np.save(_file(folder, name, record.token, "ids"), ids[order])
    with _file(folder, name, record.token, "vectors").open("wb") as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (record.rows, record.width)}
        np.lib.format.write_array_header_1_0(file, shape)
        for block in _blocks(len(order)):
            some, part = order[block], np.empty((len(order[block]), record.width), dtype="<f4")
            for rows, places, end in zip(sources, kept, ends, strict=True):
                mine = (some < end) & (some >= end - len(places))
                part[mine] = rows.vectors[places[some[mine] - (end - len(places))]]
            file.write(part.tobytes())


def _centres(sources: Sequence[VectorRows], total: int) -> Vector:
    """k-means on the sphere, on a sample; a centre that nobody is near to becomes a row at random."""
    dice, count = np.random.default_rng(0), max(1, round(2 * total**0.5))
    share = min(1.0, SAMPLES_PER_CENTROID * count / total)
    parts = [dice.random(len(rows.ids)) < share for rows in sources]
    sample = np.concatenate([rows.vectors[some] for rows, some in zip(sources, parts, strict=True)])
    sample = sample if len(sample) else np.concatenate([rows.vectors[:1] for rows in sources])
    centres = sample[dice.choice(len(sample), count, replace=count > len(sample))].copy()
    for _ in range(KMEANS_ROUNDS):
        labels = _assign(sample, centres)
        order = np.argsort(labels, kind="stable")
        there, first = np.unique(labels[order], return_index=True)
        centres = sample[dice.choice(len(sample), count)]
        centres[there] = np.add.reduceat(sample[order], first, axis=0)
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    return np.ascontiguousarray(centres, dtype=np.float32)


def _assign(vectors: Vector, centres: Vector) -> NDArray[np.intp]:
    parts = [np.argmax(vectors[block] @ centres.T, axis=1) for block in _blocks(len(vectors))]
    return np.concatenate(parts) if parts else np.empty(0, np.intp)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ROWS) for start in range(0, n, BLOCK_ROWS))
