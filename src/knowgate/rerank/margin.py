"""When the retriever is already sure: its best passage leads by so much that reranking would hardly change it."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.types import Passage


def lead(passages: Sequence[Passage]) -> float:
    """How far the best score lies above the second, as a share of the best; 0 where scores do not tell."""
    if len(passages) < 2:
        return 1.0 if passages else 0.0
    scores = [passage.score for passage in passages]
    known = sorted((score for score in scores if score is not None), reverse=True)
    if len(known) < len(scores) or scores[0] != known[0] or known[0] <= 0:
        return 0.0
    return (known[0] - max(known[1], 0.0)) / known[0]


def is_sure(passages: Sequence[Passage], margin: float | None) -> bool:
    """Whether reranking is skipped."""
    return margin is not None and lead(passages) >= margin
