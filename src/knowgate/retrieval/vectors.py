"""Writes the vectors of an index, embedding only what no earlier index has. Knows nothing of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knowgate.embedding import check_vectors
from knowgate.retrieval.store import indexed_text
from knowgate.types import Embedder, Passage, Vector

Progress = Callable[[str, int, int], None]  # stage, done, total (0: not known yet)
_CHUNK = 512


def write_vectors(
    path: Path,
    passages: Sequence[Passage],
    *,
    kept: NDArray[np.int64],
    earlier: Vector | None,
    embedder: Embedder,
    progress: Progress,
) -> Vector:
    """A memory-mapped array, one row per passage: row `kept[i]` of `earlier`, or embedded if that is -1."""
    new = np.flatnonzero(kept < 0)
    chunks = [new[start : start + _CHUNK] for start in range(0, len(new), _CHUNK)]
    vectors: Vector | None = None
    if earlier is not None and len(new) < len(kept):
        vectors = _create(path, len(kept), earlier.shape[1])
        _copy(vectors, kept, earlier)
    for number, rows in enumerate(chunks):
        embedded = _embed(embedder, [passages[int(row)] for row in rows])
        if vectors is None:
            vectors = _create(path, len(kept), embedded.shape[1])
        vectors[rows] = embedded
        progress("embed", min((number + 1) * _CHUNK, len(new)), len(new))
    assert vectors is not None  # an index has at least one passage
    return vectors


def _create(path: Path, rows: int, width: int) -> Vector:
    created: Vector = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    return created


def _copy(vectors: Vector, kept: NDArray[np.int64], earlier: Vector) -> None:
    rows = np.flatnonzero(kept >= 0)
    for start in range(0, len(rows), _CHUNK):
        block = rows[start : start + _CHUNK]
        vectors[block] = earlier[kept[block]]


def _embed(embedder: Embedder, passages: Sequence[Passage]) -> Vector:
    return check_vectors(embedder.embed([indexed_text(passage) for passage in passages]), len(passages))
