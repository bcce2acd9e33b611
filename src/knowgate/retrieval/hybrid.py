"""Reciprocal rank fusion: several rankings in one, with no need for comparable scores.

Knows nothing of how its retrievers search.
Reference: Cormack, Clarke and Büttcher 2009, Reciprocal rank fusion outperforms Condorcet and individual rank
learning methods (SIGIR); the constant 60 is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting
from knowgate.retrieval.ranking import check_k
from knowgate.types import Passage, Retriever

RRF_CONSTANT = 60


class HybridRetriever:
    """Asks every retriever for `depth` passages and fuses the rankings; equal ids are the same passage."""

    name = "hybrid"

    def __init__(self, retrievers: Sequence[Retriever], *, depth: int = 100):
        if len(retrievers) < 2:
            raise BadSetting(f"a hybrid search fuses two or more retrievers, not {len(retrievers)}.")
        self._retrievers = tuple(retrievers)
        self._depth = depth

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, str(self._depth), *(part.fingerprint for part in self._retrievers))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        found = [retriever.search(queries, max(k, self._depth)) for retriever in self._retrievers]
        return [fuse_rankings(rankings)[:k] for rankings in zip(*found, strict=True)]


def fuse_rankings(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """All passages by falling sum of 1 / (60 + rank); of equals the one seen first, ranking by ranking, leads."""
    shares: dict[str, list[float]] = {}
    passages: dict[str, Passage] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            shares.setdefault(passage.id, []).append(1 / (RRF_CONSTANT + rank))
            passages.setdefault(passage.id, passage)
    # rounded once, so that ranks 1, 2, 3 and 3, 2, 1 give the same sum
    scores = {name: math.fsum(parts) for name, parts in shares.items()}
    best = sorted(scores, key=lambda name: -scores[name])
    return [replace(passages[name], score=scores[name]) for name in best]
