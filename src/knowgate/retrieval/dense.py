"""Dense retrieval with embeddings, and the fusion of several rankings by their reciprocal ranks.

Reference: Cormack, Clarke and Büttcher 2009, Reciprocal rank fusion outperforms Condorcet and individual rank
learning methods (SIGIR); the constant 60 is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knowgate.core import split_batches
from knowgate.core.files import sha256_text
from knowgate.core.nearest_neighbors import NearestHits, find_nearest_rows, max_row_norm
from knowgate.errors import BadSetting, ModelError
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.passages import check_k, format_passage
from knowgate.types import Embedder, Passage, Retriever, Vector

RRF_CONSTANT = 60
HYBRID_DEPTH = 100  # passages requested from each retriever before merging, unless k is larger


class HybridRetriever:
    """Searches with several retrievers and merges their rankings into one.

    Passages with the same id count as the same passage.

    Args:
        retrievers: Two or more retrievers over the same documents.
    """

    name = "hybrid"

    def __init__(self, retrievers: Sequence[Retriever]):
        if len(retrievers) < 2:
            raise BadSetting(
                f"a hybrid retriever needs at least two retrievers, got {len(retrievers)}. Add one to `retrievers`."
            )
        self._retrievers = tuple(retrievers)

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, str(HYBRID_DEPTH), *(retriever.fingerprint for retriever in self._retrievers))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, best first, with their fused scores."""
        check_k(k)
        results = [retriever.search(queries, max(k, HYBRID_DEPTH)) for retriever in self._retrievers]
        # Each retriever returns one ranking per query. zip groups the rankings of a query.
        return [fuse_rankings(rankings)[:k] for rankings in zip(*results, strict=True)]


def fuse_rankings(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Merge rankings by reciprocal rank fusion.

    The score of a passage is the sum of 1 / (60 + rank).

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


NO_ROW = -1  # instead of a row number: the passage has no vector in the previous index
_EMBEDDED_AT_ONCE = 512  # passages embedded, or vectors copied, at once

ProgressCallback = Callable[[str, int, int], None]  # stage, done, total (0 while the total is unknown)


class DenseRetriever:
    """Finds the passages nearest in meaning to a query.

    Even unrelated passages are returned, up to `k`.

    Args:
        vectors: The vectors of the passages, one per row.
        passages: The passages, in the order of the vectors.
        embedder: The embedding model that made the vectors. It embeds the queries.
        fingerprint: A hash that identifies the documents and the settings of the index.
    """

    name = "dense"

    def __init__(self, vectors: Vector, passages: Sequence[Passage], *, embedder: Embedder, fingerprint: str):
        self._vectors = vectors
        self._passages = passages
        self._embedder = embedder
        self.fingerprint = fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the k nearest passages of each query, best first.

        Raises:
            ModelError: The embedding model returns vectors of another size than those of the index.
        """
        check_k(k)
        if not queries:
            return []
        query_vectors = self._embed_queries(queries)
        results = find_nearest_rows(self._vectors, query_vectors, k, max_norm=self._max_norm)
        return [self._get_passages(hits) for hits in results]

    def _embed_queries(self, queries: Sequence[str]) -> Vector:
        """Return a vector for each query, as wide as the vectors of the index."""
        vectors = check_vectors(self._embedder.embed(queries), len(queries))
        width = self._vectors.shape[1]
        if vectors.shape[1] != width:
            raise ModelError(
                f"the embedding model returns vectors of {vectors.shape[1]} numbers, but the index holds vectors of "
                f"{width} numbers. Use the embedding model that the index was built with."
            )
        return vectors

    @cached_property
    def _max_norm(self) -> float:
        return max_row_norm(self._vectors)

    def _get_passages(self, hits: NearestHits) -> list[Passage]:
        """Return the passages of the hits, with their scores."""
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
) -> None:
    """Write one vector per passage to a file, reusing the vectors of passages that did not change.

    Args:
        path: The `.npy` file to write.
        passages: The passages. There must be at least one.
        previous_rows: For each passage, the row of its vector in `previous_vectors`, or NO_ROW if it is new or changed.
        previous_vectors: The vectors of the previous version of the index; None if they cannot be reused.
        embedder: The model that embeds new and changed passages.
        progress: Called after each batch with the stage `embed`, the number of embedded passages and their total.
    """
    vectors: Vector | None = None  # created when the width of a vector is known
    if previous_vectors is None:
        previous_rows = np.full(len(passages), NO_ROW)
    elif (previous_rows != NO_ROW).any():
        vectors = _create_memmap(path, len(passages), previous_vectors.shape[1])
        _copy_rows(vectors, previous_rows, previous_vectors)
    new_rows = np.flatnonzero(previous_rows == NO_ROW)
    for start in range(0, len(new_rows), _EMBEDDED_AT_ONCE):
        rows = new_rows[start : start + _EMBEDDED_AT_ONCE]
        embedded = _embed_passages([passages[int(row)] for row in rows], embedder)
        if vectors is None:
            vectors = _create_memmap(path, len(passages), embedded.shape[1])
        vectors[rows] = embedded
        progress("embed", start + len(rows), len(new_rows))


def _embed_passages(passages: Sequence[Passage], embedder: Embedder) -> Vector:
    """Return a vector for each passage, computed from its title and text."""
    texts = [format_passage(passage) for passage in passages]
    return check_vectors(embedder.embed(texts), len(texts))


def _create_memmap(path: Path, rows: int, width: int) -> Vector:
    """Create a `.npy` file for vectors and return it as a writable memory map."""
    vectors: Vector = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    return vectors


def _copy_rows(vectors: Vector, previous_rows: NDArray[np.int64], previous_vectors: Vector) -> None:
    """Copy the previous vectors of unchanged passages into `vectors`, block by block to limit memory."""
    for block in split_batches(np.flatnonzero(previous_rows != NO_ROW), _EMBEDDED_AT_ONCE):
        vectors[block] = previous_vectors[previous_rows[block]]
