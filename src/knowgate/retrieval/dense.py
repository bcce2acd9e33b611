"""Dense retrieval: the passages whose vectors have the highest inner product with the query's vector.

Search is exact and runs block by block over a memory map, so memory stays flat. Above `MIN_ANN_ROWS` rows an
approximate index of faiss (extra `faiss`) is built next to the vectors and used if faiss is installed.

Why IVF-Flat: a flat index of faiss is loaded whole and still reads every row; HNSW adds a graph that must stay in
memory and is slow to build. An inverted file is trained on a sample, adds only row numbers to the vectors, is mapped
from disk, and its scores are exact: it can only miss rows of lists that are not visited.
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
from knowgate.retrieval.passages import check_k, format_passage
from knowgate.types import Embedder, Passage, Vector

MIN_ANN_ROWS = 500_000  # exact search takes 15 ms per 100,000 rows of 384 (measured on two ARM cores)
_LISTS_PER_ROOT = 4  # lists = 4 * sqrt(rows), from the guidelines of faiss
_TRAINING_ROWS_PER_LIST = 64  # k-means of faiss asks for 39 to 256
_VISITED_LISTS = 64
_EXTRA_ROWS = 32
_ANN_BLOCK_ROWS = 65_536
_EMBEDDED_AT_ONCE = 512

ProgressCallback = Callable[[str, int, int], None]  # stage, done, total (0 while the total is unknown)


class VectorSearch(Protocol):
    """Finds the rows nearest to each query vector."""

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]: ...


class ExactVectorSearch:
    """Compares the query with every row."""

    def __init__(self, vectors: Vector, *, block_rows: int = BLOCK_ROWS):
        self._vectors = vectors
        self._block_rows = block_rows

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        return find_nearest_rows(self._vectors, queries, k, max_norm=self._max_norm, block_rows=self._block_rows)

    @cached_property
    def _max_norm(self) -> float:
        return max_row_norm(self._vectors, block_rows=self._block_rows)


class AnnVectorSearch:
    """Compares the query only with the rows of the nearest lists of an inverted file.

    faiss returns `_EXTRA_ROWS` more rows than requested, and the best are ranked as in exact search. If more rows than
    that are tied, which of them are returned is up to faiss.
    """

    def __init__(self, path: Path, vectors: Vector, *, visited: int = _VISITED_LISTS):
        import faiss

        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", visited)
        self._index = index
        self._vectors = vectors

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        _, candidates = self._index.search(queries, min(k + _EXTRA_ROWS, len(self)))
        rows = [np.sort(row[row >= 0]).astype(np.intp) for row in candidates]  # faiss pads with -1
        pairs = zip(rows, queries, strict=True)
        return [score_rows(self._vectors, query_rows, query).top(k) for query_rows, query in pairs]


def has_faiss() -> bool:
    """Return whether faiss is installed."""
    return importlib.util.find_spec("faiss") is not None


def build_ann_index(vectors: Vector, path: Path) -> None:
    """Train an inverted file of faiss on evenly spaced rows, add all rows block by block and write it to `path`."""
    import faiss

    rows, width = vectors.shape
    lists = max(1, int(_LISTS_PER_ROOT * rows**0.5))
    index = faiss.index_factory(width, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    step = max(1, rows // (_TRAINING_ROWS_PER_LIST * lists))
    index.train(np.ascontiguousarray(vectors[::step]))
    for start in range(0, rows, _ANN_BLOCK_ROWS):
        index.add(np.ascontiguousarray(vectors[start : start + _ANN_BLOCK_ROWS]))
    faiss.write_index(index, str(path))


class DenseRetriever:
    """Finds the passages nearest in meaning; always returns k passages if there are k, however unrelated.

    Args:
        search: Finds rows by vector.
        passages: The passages in the order of the rows.
        embedder: The model that embedded the passages; embeds the queries.
        width: The length of a vector.
        fingerprint: Identifies the documents and settings.
    """

    name = "dense"

    def __init__(
        self, search: VectorSearch, passages: Sequence[Passage], *, embedder: Embedder, width: int, fingerprint: str
    ):
        self._vector_search = search
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
                f"the embedding model returns vectors of {vectors.shape[1]} numbers, the index holds vectors of "
                f"{self._width}. Use the model the index was built with."
            )
        return [self._get_passages(hits) for hits in self._vector_search.nearest(vectors, k)]

    def _get_passages(self, hits: NearestHits) -> list[Passage]:
        pairs = zip(hits.rows, hits.scores, strict=True)
        return [replace(self._passages[int(row)], score=float(score)) for row, score in pairs]


def write_vectors(
    path: Path,
    passages: Sequence[Passage],
    *,
    previous_rows: NDArray[np.int64],
    previous_vectors: Vector | None,
    embedder: Embedder,
    progress: ProgressCallback,
) -> Vector:
    """Write one vector per passage to `path`, embedding only passages that have no vector yet.

    Args:
        path: The `.npy` file to write.
        passages: At least one.
        previous_rows: The row of each passage in `previous_vectors`, or -1 if it must be embedded.
        previous_vectors: The vectors of an earlier index.
        embedder: Embeds the other passages.
        progress: Called with the stage `embed` after each batch.

    Returns:
        The vectors as a memory map.
    """
    new_rows = np.flatnonzero(previous_rows < 0)
    vectors: Vector | None = None
    if previous_vectors is not None and len(new_rows) < len(previous_rows):
        vectors = _create_memmap(path, len(previous_rows), previous_vectors.shape[1])
        _copy_rows(vectors, previous_rows, previous_vectors)
    for start in range(0, len(new_rows), _EMBEDDED_AT_ONCE):
        rows = new_rows[start : start + _EMBEDDED_AT_ONCE]
        texts = [format_passage(passages[int(row)]) for row in rows]
        embedded = check_vectors(embedder.embed(texts), len(texts))
        if vectors is None:
            vectors = _create_memmap(path, len(previous_rows), embedded.shape[1])
        vectors[rows] = embedded
        progress("embed", start + len(rows), len(new_rows))
    assert vectors is not None
    return vectors


def _create_memmap(path: Path, rows: int, width: int) -> Vector:
    vectors: Vector = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    return vectors


def _copy_rows(vectors: Vector, previous_rows: NDArray[np.int64], previous_vectors: Vector) -> None:
    rows = np.flatnonzero(previous_rows >= 0)
    for start in range(0, len(rows), _EMBEDDED_AT_ONCE):
        block = rows[start : start + _EMBEDDED_AT_ONCE]
        vectors[block] = previous_vectors[previous_rows[block]]
