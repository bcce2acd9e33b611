"""Search by meaning: the passages whose vectors have the highest inner product with the query's.

Exact, block by block over a memory map, so memory stays flat; equal scores go by row, whatever the blocks (see
`knowgate.core.nearest_neighbors`). Above `ANN_ROWS` rows an inverted file of faiss stands beside the vectors if it was built (see
`ann.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knowgate.core.nearest_neighbors import BLOCK_ROWS, NearestHits, find_nearest_rows, max_row_norm, score_rows
from knowgate.errors import ModelError
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.passage_store import format_indexed_text
from knowgate.retrieval.ranking import check_k
from knowgate.types import Embedder, Passage, Vector


class VectorSearch(Protocol):
    """Finds the rows nearest to each query vector."""

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]: ...


class ExactVectorSearch:
    """Looks at every row."""

    def __init__(self, vectors: Vector, *, block_rows: int = BLOCK_ROWS):
        self._vectors = vectors
        self._block_rows = block_rows

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        return find_nearest_rows(self._vectors, queries, k, longest=self._longest, block_rows=self._block_rows)

    @cached_property
    def _longest(self) -> float:
        return max_row_norm(self._vectors, block_rows=self._block_rows)


class DenseRetriever:
    """Always returns k passages where there are k, however far off they are."""

    name = "dense"

    def __init__(
        self,
        search: VectorSearch,
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

    def _passages_of(self, hits: NearestHits) -> list[Passage]:
        found = zip(hits.rows, hits.scores, strict=True)
        return [replace(self._passages[int(row)], score=float(score)) for row, score in found]


MIN_ANN_ROWS = 500_000  # exact search takes 15 ms per 100,000 rows of 384 (measured on two ARM cores)
_LISTS_PER_ROOT = 4  # lists = 4 * sqrt(rows), faiss guidelines
_TRAINED_PER_LIST = 64  # k-means of faiss asks for 39 to 256 samples a list
_VISITED = 64
_SPARE = 32
_BLOCK_ROWS = 65_536


def has_faiss() -> bool:
    return importlib.util.find_spec("faiss") is not None


def build_ann_index(vectors: Vector, path: Path) -> None:
    """Train on a spread of rows, then add all of them block by block."""
    import faiss

    rows, width = vectors.shape
    lists = max(1, int(_LISTS_PER_ROOT * rows**0.5))
    index = faiss.index_factory(width, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    step = max(1, rows // (_TRAINED_PER_LIST * lists))
    index.train(np.ascontiguousarray(vectors[::step]))
    for start in range(0, rows, _BLOCK_ROWS):
        index.add(np.ascontiguousarray(vectors[start : start + _BLOCK_ROWS]))
    faiss.write_index(index, str(path))


class AnnVectorSearch:
    """Looks only into the lists nearest to the query.

    faiss names `_SPARE` rows more than asked for, and the best of them are told apart as exact search does; which of
    more equal rows it names is its own affair.
    """

    def __init__(self, path: Path, vectors: Vector, *, visited: int = _VISITED):
        import faiss

        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", visited)
        self._index = index
        self._vectors = vectors

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        _, named = self._index.search(queries, min(k + _SPARE, len(self)))
        rows = [np.sort(row[row >= 0]).astype(np.intp) for row in named]  # -1: none left
        return [score_rows(self._vectors, some, query).best(k) for some, query in zip(rows, queries, strict=True)]


ProgressCallback = Callable[[str, int, int], None]  # stage, done, total (0: not known yet)
_CHUNK = 512


def write_vectors(
    path: Path,
    passages: Sequence[Passage],
    *,
    kept: NDArray[np.int64],
    earlier: Vector | None,
    embedder: Embedder,
    progress: ProgressCallback,
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
    return check_vectors(embedder.embed([format_indexed_text(passage) for passage in passages]), len(passages))
