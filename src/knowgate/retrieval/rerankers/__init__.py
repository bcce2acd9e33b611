"""Rerankers, which score retrieved passages again and sort them. Importing this package does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.core.registry import RegistryEntry, load_entry, split_spec
from knowgate.errors import ModelError
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage, Reranker

RERANKER_GROUP = "knowgate.rerankers"

# Each target is called with the part of a spec after "name:" and returns a Reranker.
RERANKERS: dict[str, RegistryEntry] = {
    "cross-encoder": RegistryEntry("knowgate.retrieval.rerankers.cross_encoder:CrossEncoderReranker",
        "reads question and passage together", extra="local", paper="Nogueira and Cho 2019"),
    "api": RegistryEntry("knowgate.retrieval.rerankers.remote:RemoteReranker",
        "api:MODEL@URL, a server with the rerank API of Cohere and Jina"),
    "tei": RegistryEntry("knowgate.retrieval.rerankers.remote:TeiReranker", "tei:URL, a server of text-embeddings-inference"),
}  # fmt: skip


def as_reranker(reranker: str | Path | Reranker) -> Reranker:
    """Return a reranker object as it is, or load one from a spec or a folder (see `load_reranker`)."""
    return load_reranker(str(reranker)) if isinstance(reranker, str | Path) else reranker


def load_reranker(spec: str) -> Reranker:
    """Load a reranker from a spec, a folder or a hub name.

    Args:
        spec: `cross-encoder:NAME_OR_DIR`, `api:MODEL@URL` or `tei:URL`. A folder or a hub name (`owner/model`) without
            a prefix means a cross-encoder.

    Raises:
        UnknownName: No reranker has this name.
    """
    name, argument = split_spec(spec)
    if Path(spec).is_dir() or (not argument and "/" in spec):
        name = "cross-encoder"
        argument = spec
    reranker: Reranker = load_entry(RERANKERS, "reranker", name, RERANKER_GROUP)(argument)
    return reranker


def rerank(
    reranker: Reranker, questions: Sequence[str], passages: Sequence[Sequence[Passage]], k: int
) -> list[list[Passage]]:
    """Score the passages of each question again, and return the k best.

    Args:
        reranker: Scores the passages.
        questions: The questions.
        passages: The retrieved passages of each question. Passages with equal scores keep their order.
        k: How many passages to return for each question.
    """
    check_k(k)
    scores = reranker.score(questions, passages)
    return [_select_best(row, row_scores, k) for row, row_scores in zip(passages, scores, strict=True)]


def _select_best(passages: Sequence[Passage], scores: Sequence[float], k: int) -> list[Passage]:
    """Return the k passages with the highest scores, best first."""
    if not all(math.isfinite(score) for score in scores):
        raise ModelError("the reranker returned a score that is not a number (NaN or infinite). Use another reranker.")
    ranked = sorted(zip(passages, scores, strict=True), key=lambda pair: -pair[1])
    return [replace(passage, score=score) for passage, score in ranked[:k]]


def can_skip_reranking(passages: Sequence[Passage], margin: float | None) -> bool:
    """Return whether the best passage leads so clearly that reranking would hardly change the order.

    Args:
        passages: The retrieved passages with their scores.
        margin: Skip reranking if the lead of the best passage (see `compute_score_lead`) is at least this, from 0 to 1.
            None never skips it.
    """
    return margin is not None and compute_score_lead(passages) >= margin


def compute_score_lead(passages: Sequence[Passage]) -> float:
    """Return the lead of the best passage over the second best, from 0 to 1.

    Example: scores 4 and 3 give 0.25.
    """
    if len(passages) < 2:
        return 1.0 if passages else 0.0
    scores = [passage.score for passage in passages if passage.score is not None]
    if len(scores) < len(passages) or scores[0] < max(scores) or scores[0] <= 0:
        return 0.0
    second = max(0.0, *scores[1:])  # a negative score counts as 0
    return (scores[0] - second) / scores[0]
