"""Reciprocal rank fusion: merge several rankings into one without comparing their scores.

Reference: Cormack, Clarke and Büttcher 2009, Reciprocal rank fusion outperforms Condorcet and individual rank
learning methods (SIGIR); the constant 60 is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage, Retriever

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
        return [fuse_rankings(rankings)[:k] for rankings in zip(*results, strict=True)]


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
