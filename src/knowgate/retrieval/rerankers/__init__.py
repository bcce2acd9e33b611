"""Rerankers by name, and the one thing done with their scores. Importing this loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.core.registry import RegistryEntry, load_entry, split_spec
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


RERANKER_GROUP = "knowgate.rerankers"

# Each target takes what stands after "name:" in a spec and gives a Reranker.
RERANKERS: dict[str, RegistryEntry] = {
    "cross-encoder": RegistryEntry(
        "knowgate.retrieval.rerankers.cross_encoder:CrossEncoderReranker",
        "reads question and passage together",
        extra="local",
        paper="Nogueira and Cho 2019",
    ),
    "api": RegistryEntry(
        "knowgate.retrieval.rerankers.remote:RemoteReranker",
        "api:MODEL@URL, a server that reranks as Cohere and Jina do",
    ),
    "tei": RegistryEntry(
        "knowgate.retrieval.rerankers.remote:TeiReranker", "tei:URL, a server of text-embeddings-inference"
    ),
}


def as_reranker(reranker: str | Path | Reranker) -> Reranker:
    """The reranker itself, or the one a spec or folder names."""
    return load_reranker(str(reranker)) if isinstance(reranker, str | Path) else reranker


def load_reranker(spec: str) -> Reranker:
    """`cross-encoder:NAME_OR_DIR`, `api:MODEL@URL`, `tei:URL`; a folder or hub name (`owner/model`) does by itself."""
    name, rest = split_spec(spec)
    if Path(spec).is_dir() or (not rest and "/" in spec):
        name, rest = "cross-encoder", spec
    reranker: Reranker = load_entry(RERANKERS, "reranker", name, RERANKER_GROUP)(rest)
    return reranker


def compute_score_lead(passages: Sequence[Passage]) -> float:
    """How far the best score lies above the second, as a share of the best; 0 where scores do not tell."""
    if len(passages) < 2:
        return 1.0 if passages else 0.0
    scores = [passage.score for passage in passages]
    known = sorted((score for score in scores if score is not None), reverse=True)
    if len(known) < len(scores) or scores[0] != known[0] or known[0] <= 0:
        return 0.0
    return (known[0] - max(known[1], 0.0)) / known[0]


def can_skip_reranking(passages: Sequence[Passage], margin: float | None) -> bool:
    """Whether reranking is skipped."""
    return margin is not None and compute_score_lead(passages) >= margin
