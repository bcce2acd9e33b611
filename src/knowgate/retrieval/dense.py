"""Dense retrieval with embeddings, and the fusion of several rankings by their reciprocal ranks.

Reference: Cormack, Clarke and Büttcher 2009, Reciprocal rank fusion outperforms Condorcet and individual rank
learning methods (SIGIR); the constant 60 is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from knowgate.core.files import sha256_text
from knowgate.core.nearest_neighbors import find_nearest_rows, max_row_norm
from knowgate.errors import ModelError
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.passages import check_k, read_hits
from knowgate.types import Embedder, Passage, Retriever, Vector

RRF_CONSTANT = 60
HYBRID_DEPTH = 100  # passages requested from each retriever before merging, unless k is larger


class HybridRetriever:
    """Searches with several retrievers and merges their rankings into one.

    Passages with the same id count as the same passage.

    Args:
        retrievers: Retrievers over the same documents.
    """

    name = "hybrid"

    def __init__(self, retrievers: Sequence[Retriever]):
        self._retrievers = retrievers

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
        return [read_hits(self._passages, hits) for hits in results]

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
