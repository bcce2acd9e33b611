"""Dense retrieval with embeddings, and the fusion of several rankings by their reciprocal ranks.

Reference: Cormack, Clarke and Büttcher 2009, Reciprocal rank fusion outperforms Condorcet and individual rank
learning methods (SIGIR); the constant 60 is theirs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import sha256_text
from knowgate.core.nearest_neighbors import BLOCK_ROWS, NearestHits, find_nearest_rows, max_row_norm, score_rows
from knowgate.errors import BadSetting, ModelError
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.passages import check_k, format_passage
from knowgate.types import Embedder, Passage, Retriever, Vector

RRF_CONSTANT = 60


class HybridRetriever:
    """Searches with several retrievers and merges their rankings into one.

    Passages with the same id count as the same passage.

    Args:
        retrievers: Two or more retrievers over the same documents.
        depth: How many passages to request from each retriever before merging, if that is more than `k`.
    """

    name = "hybrid"

    def __init__(self, retrievers: Sequence[Retriever], *, depth: int = 100):
        if len(retrievers) < 2:
            raise BadSetting(
                f"a hybrid retriever needs at least two retrievers, got {len(retrievers)}. Add one to `retrievers`."
            )
        self._retrievers = tuple(retrievers)
        self._depth = depth

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, str(self._depth), *(retriever.fingerprint for retriever in self._retrievers))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, best first, with their fused scores."""
        check_k(k)
        results = [retriever.search(queries, max(k, self._depth)) for retriever in self._retrievers]
        return [fuse_rankings([rankings[i] for rankings in results])[:k] for i in range(len(queries))]


def fuse_rankings(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Merge rankings by reciprocal rank fusion.

    The score of a passage is the sum of 1 / (60 + rank) over the rankings that contain it, where the best rank is 1.

    Args:
        rankings: Lists of passages, each best first.

    Returns:
        All distinct passages by decreasing score. Ties keep the order in which the passages first appear.
    """
    contributions: dict[str, list[float]] = {}
    passages: dict[str, Passage] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            contributions.setdefault(passage.id, []).append(1 / (RRF_CONSTANT + rank))
            passages.setdefault(passage.id, passage)
    # fsum rounds only once, so that the order of the ranks (1, 2, 3 or 3, 2, 1) does not change the sum.
    scores = {passage_id: math.fsum(parts) for passage_id, parts in contributions.items()}
    best_first = sorted(scores, key=lambda passage_id: -scores[passage_id])
    return [replace(passages[passage_id], score=scores[passage_id]) for passage_id in best_first]


MIN_ANN_ROWS = 500_000  # exact search takes 15 ms per 100,000 vectors of 384 numbers (measured on two ARM cores)
_LISTS_PER_ROOT = 4  # lists = 4 * sqrt(rows), from the guidelines of faiss
_TRAINING_ROWS_PER_LIST = 64  # the k-means of faiss recommends 39 to 256 training vectors per list
_VISITED_LISTS = 64  # lists that a search reads (nprobe in faiss)
_EXTRA_ROWS = 32  # rows requested from faiss beyond k, so that ties are ranked as in exact search
_ANN_BLOCK_ROWS = 65_536  # vectors added to the faiss index at once
_EMBEDDED_AT_ONCE = 512  # passages embedded, or vectors copied, at once

ProgressCallback = Callable[[str, int, int], None]  # stage, done, total (0 while the total is unknown)


class VectorSearch(Protocol):
    """Finds the stored vectors nearest to each query vector."""

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        """Return the row numbers and scores of the k nearest vectors of each query."""
        ...


class ExactVectorSearch:
    """Exact search, which compares each query with every vector.

    A fast matrix product, which has rounding errors, selects candidates. These are scored again exactly. So that no
    true neighbor is missed, all vectors whose score is within the largest possible rounding error are candidates.

    Args:
        vectors: The vectors to search, one per row.
        block_rows: How many vectors to read at once.
    """

    def __init__(self, vectors: Vector, *, block_rows: int = BLOCK_ROWS):
        self._vectors, self._block_rows = vectors, block_rows

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        return find_nearest_rows(self._vectors, queries, k, max_norm=self._max_norm, block_rows=self._block_rows)

    @cached_property
    def _max_norm(self) -> float:
        """The largest norm of a vector."""
        return max_row_norm(self._vectors, block_rows=self._block_rows)


class AnnVectorSearch:
    """Approximate search with faiss, which divides the vectors into lists and reads only those nearest to a query.

    faiss returns a few more rows than needed. These candidates are scored and ranked as in exact search, so that rows
    with equal scores come in the same order.

    Args:
        path: The file that `build_ann_index` wrote.
        vectors: The vectors that the file was built from.
        visited: How many lists to visit. More lists find more of the true neighbors and take longer.
    """

    def __init__(self, path: Path, vectors: Vector, *, visited: int = _VISITED_LISTS):
        import faiss

        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", visited)
        self._index, self._vectors = index, vectors

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, queries: Vector, k: int) -> list[NearestHits]:
        _, candidates = self._index.search(queries, min(k + _EXTRA_ROWS, len(self)))
        rows = [np.sort(row[row >= 0]).astype(np.intp) for row in candidates]  # faiss fills missing results with -1
        pairs = zip(rows, queries, strict=True)
        return [score_rows(self._vectors, query_rows, query).top(k) for query_rows, query in pairs]


def has_faiss() -> bool:
    """Return whether the package faiss is installed."""
    return importlib.util.find_spec("faiss") is not None


def train_ann_index(vectors: Vector, lists: int) -> Any:
    """Create an empty faiss index for approximate search (an inverted file).

    Such an index divides vectors into lists of similar vectors, so that a search reads only the nearest lists. The
    centers of the lists are trained on a sample of the vectors.

    Args:
        vectors: The vectors that will be added later.
        lists: Number of lists.
    """
    import faiss

    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    n_training_rows = _TRAINING_ROWS_PER_LIST * lists
    step = max(1, len(vectors) // n_training_rows)  # every `step`-th vector is used
    index.train(np.ascontiguousarray(vectors[::step]))
    return index


def build_ann_index(vectors: Vector, path: Path) -> None:
    """Build a faiss inverted file for approximate search and write it to `path`.

    The lists are trained on evenly spaced vectors; then all vectors are added, block by block.
    """
    import faiss

    rows = len(vectors)
    index = train_ann_index(vectors, max(1, int(_LISTS_PER_ROOT * rows**0.5)))
    for start in range(0, rows, _ANN_BLOCK_ROWS):
        index.add(np.ascontiguousarray(vectors[start : start + _ANN_BLOCK_ROWS]))
    faiss.write_index(index, str(path))


class DenseRetriever:
    """Finds the passages nearest in meaning to a query.

    It returns k passages whenever the index has that many, even if they are unrelated to the query.

    Args:
        search: Finds the stored vectors nearest to a query vector.
        passages: The passages, in the order of the stored vectors.
        embedder: The embedding model of the stored vectors. It embeds the queries.
        width: The number of values in a vector.
        fingerprint: A hash that identifies the documents and the settings of the index.
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
        """Return the k nearest passages of each query, best first.

        Raises:
            ModelError: The embedding model returns vectors of another size than those of the index.
        """
        check_k(k)
        if not queries:
            return []
        vectors = check_vectors(self._embedder.embed(queries), len(queries))
        if vectors.shape[1] != self._width:
            raise ModelError(
                f"the embedding model returns vectors of {vectors.shape[1]} numbers, but the index holds vectors of "
                f"{self._width} numbers. Use the embedding model that the index was built with."
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
    """Write one vector per passage to a file, reusing the vectors of passages that did not change.

    Args:
        path: The `.npy` file to write.
        passages: The passages. There must be at least one.
        previous_rows: For each passage, the row of its vector in `previous_vectors`; -1 for a new or changed passage.
        previous_vectors: The vectors of the previous version of the index; None if they cannot be reused.
        embedder: The model that embeds new and changed passages.
        progress: Called after each batch with the stage `embed`, the number of embedded passages and their total.

    Returns:
        The vectors, memory-mapped from the file.
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
    """Create a `.npy` file for vectors and return it as a writable memory map."""
    vectors: Vector = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    return vectors


def _copy_rows(vectors: Vector, previous_rows: NDArray[np.int64], previous_vectors: Vector) -> None:
    """Copy the previous vectors of unchanged passages into `vectors`, block by block to limit memory."""
    rows = np.flatnonzero(previous_rows >= 0)
    for start in range(0, len(rows), _EMBEDDED_AT_ONCE):
        block = rows[start : start + _EMBEDDED_AT_ONCE]
        vectors[block] = previous_vectors[previous_rows[block]]
