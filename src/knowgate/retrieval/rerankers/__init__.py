"""Rerankers: put retrieved passages in a better order. Importing this package loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.core.registry import RegistryEntry, load_entry, split_spec
from knowgate.errors import BadSetting, ModelError
from knowgate.types import Passage, Reranker

RERANKER_GROUP = "knowgate.rerankers"

# Each target is called with the part of a spec after "name:" and returns a Reranker.
RERANKERS: dict[str, RegistryEntry] = {
    "cross-encoder": RegistryEntry(
        "knowgate.retrieval.rerankers.cross_encoder:CrossEncoderReranker",
        "reads question and passage together",
        extra="local",
        paper="Nogueira and Cho 2019",
    ),
    "api": RegistryEntry(
        "knowgate.retrieval.rerankers.remote:RemoteReranker",
        "api:MODEL@URL, a server with the rerank API of Cohere and Jina",
    ),
    "tei": RegistryEntry(
        "knowgate.retrieval.rerankers.remote:TeiReranker", "tei:URL, a server of text-embeddings-inference"
    ),
}


def as_reranker(reranker: str | Path | Reranker) -> Reranker:
    """Return a reranker unchanged; load one from a spec or a folder."""
    return load_reranker(str(reranker)) if isinstance(reranker, str | Path) else reranker


def load_reranker(spec: str) -> Reranker:
    """Load a reranker.

    Args:
        spec: `cross-encoder:NAME_OR_DIR`, `api:MODEL@URL` or `tei:URL`. A folder or a hub name (`owner/model`) alone
            means a cross-encoder.
    """
    name, argument = split_spec(spec)
    if Path(spec).is_dir() or (not argument and "/" in spec):
        name, argument = "cross-encoder", spec
    reranker: Reranker = load_entry(RERANKERS, "reranker", name, RERANKER_GROUP)(argument)
    return reranker


def rerank(
    reranker: Reranker, questions: Sequence[str], passages: Sequence[Sequence[Passage]], k: int
) -> list[list[Passage]]:
    """Return the k best passages of each question with their new scores; ties keep their order."""
    if k < 1:
        raise BadSetting(f"k={k} is not allowed: it must be at least 1.")
    scores = reranker.score(questions, passages)
    return [_select_best(row, row_scores, k) for row, row_scores in zip(passages, scores, strict=True)]


def _select_best(passages: Sequence[Passage], scores: Sequence[float], k: int) -> list[Passage]:
    if not all(math.isfinite(score) for score in scores):
        raise ModelError("the reranker returned a score that is not a number (NaN or infinite).")
    scored = [replace(passage, score=score) for passage, score in zip(passages, scores, strict=True)]
    order = sorted(range(len(scored)), key=lambda index: -scores[index])
    return [scored[index] for index in order[:k]]


def can_skip_reranking(passages: Sequence[Passage], margin: float | None) -> bool:
    """Return whether the best passage leads by at least `margin`, so that reranking would hardly change the order."""
    return margin is not None and compute_score_lead(passages) >= margin


def compute_score_lead(passages: Sequence[Passage]) -> float:
    """Return (best - second best) / best of the retriever's scores; 0 if they are missing, unordered or negative."""
    if len(passages) < 2:
        return 1.0 if passages else 0.0
    scores = [passage.score for passage in passages]
    known = sorted((score for score in scores if score is not None), reverse=True)
    if len(known) < len(scores) or scores[0] != known[0] or known[0] <= 0:
        return 0.0
    return (known[0] - max(known[1], 0.0)) / known[0]
