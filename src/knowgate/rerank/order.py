"""Puts passages in the order of a reranker's scores. Knows nothing of how they are scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from knowgate.errors import BadSetting, ModelError
from knowgate.types import Passage, Reranker


def rerank(
    reranker: Reranker, questions: Sequence[str], passages: Sequence[Sequence[Passage]], k: int
) -> list[list[Passage]]:
    """For each question its best k passages with their new scores; equals stay in the order they came in."""
    if k < 1:
        raise BadSetting(f"k is {k}; reranking keeps at least 1 passage.")
    scores = reranker.score(questions, passages)
    return [_best(found, row, k) for found, row in zip(passages, scores, strict=True)]


def _best(passages: Sequence[Passage], scores: Sequence[float], k: int) -> list[Passage]:
    if not all(math.isfinite(score) for score in scores):
        raise ModelError("the reranker gave a score that is not a number (NaN or infinite).")
    scored = [replace(passage, score=score) for passage, score in zip(passages, scores, strict=True)]
    order = sorted(range(len(scored)), key=lambda place: -scores[place])
    return [scored[place] for place in order[:k]]
