"""Question and draft as sentence embeddings: all there is to read of an LLM behind an API."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from knowgate.embedding import check_vectors
from knowgate.errors import NotOffered
from knowgate.text import render_choices
from knowgate.types import Embedder, Question, Reading, Vector

PIECE = re.compile(r"[A-Za-z0-9]+|\S")


def draft_texts(readings: Sequence[Reading]) -> list[str]:
    """The text of each draft."""
    if any(reading.draft is None for reading in readings):
        raise NotOffered("the reading has no draft, which the gate was fitted with. Use a backend that drafts answers.")
    return [reading.draft.text if reading.draft else "" for reading in readings]


def text_features(embedder: Embedder, questions: Sequence[Question], texts: Sequence[str], tokens: int) -> Vector:
    """Embeddings of the question and of question + draft, side by side."""
    alone = [render_choices(question) for question in questions]
    joined = [f"{query}\n{first_pieces(text, tokens)}" for query, text in zip(alone, texts, strict=True)]
    vectors = [check_vectors(embedder.embed(part), len(alone)) for part in (alone, joined)]
    return np.hstack(vectors).astype(np.float32)


def first_pieces(text: str, n: int) -> str:
    """The first n words or signs: what stands for tokens where the LLM's tokenizer is not at hand."""
    ends = [match.end() for match in PIECE.finditer(text)][:n]
    return text[: ends[-1]].strip() if ends else ""
