"""The hidden states of readings as a matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from knowgate.core.text import render_choices
from knowgate.errors import NotOffered
from knowgate.retrieval.embeddings import check_vectors
from knowgate.types import Embedder, Question, Reading, Vector


def stack_hidden_states(readings: Sequence[Reading], layer: int, position: str) -> Vector:
    """The hidden states of a layer: `pre` at the last prompt token, `post` at the last drafted one."""
    states = [(reading.hidden if position == "pre" else reading.hidden_after).get(layer) for reading in readings]
    given = [state for state in states if state is not None]
    if len(given) < len(states):
        raise NotOffered(
            f"the reading has no hidden states of layer {layer} ({position}). Label with --layers {layer}, or use "
            "a backend that gives hidden states (hf, gguf, smollm).",
            brief=f"no hidden states of layer {layer}",
        )
    return np.stack(given)


WORD_OR_SYMBOL = re.compile(r"[A-Za-z0-9]+|\S")


def draft_texts(readings: Sequence[Reading]) -> list[str]:
    """The text of each draft."""
    if any(reading.draft is None for reading in readings):
        raise NotOffered("the reading has no draft, which the gate was fitted with. Use a backend that drafts answers.")
    return [reading.draft.text if reading.draft else "" for reading in readings]


def text_features(embedder: Embedder, questions: Sequence[Question], texts: Sequence[str], tokens: int) -> Vector:
    """Embeddings of the question and of question + draft, side by side."""
    alone = [render_choices(question) for question in questions]
    joined = [f"{query}\n{truncate_words(text, tokens)}" for query, text in zip(alone, texts, strict=True)]
    vectors = [check_vectors(embedder.embed(part), len(alone)) for part in (alone, joined)]
    return np.hstack(vectors).astype(np.float32)


def truncate_words(text: str, n: int) -> str:
    """The first n words or signs: what stands for tokens where the LLM's tokenizer is not at hand."""
    ends = [match.end() for match in WORD_OR_SYMBOL.finditer(text)][:n]
    return text[: ends[-1]].strip() if ends else ""


SURFACE_WIDTH = 9  # numbers for each question
CJK = ("\u4e00", "\u9fff")


def surface_features(questions: Sequence[Question]) -> Vector:
    """A row for each question, its choices included."""
    return np.array([_features(_written(question)) for question in questions], dtype=np.float32)


def _written(question: Question) -> str:
    return render_choices(question) if question.choices else question.text


def _features(text: str) -> list[float]:
    words, size = text.split(), max(len(text), 1)
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        size / max(len(words), 1),
        float(text.count("\n")),
        float(text.rstrip().endswith(("?", "？"))),
        sum(CJK[0] <= char <= CJK[1] for char in text) / size,
        sum(char.isdigit() for char in text) / size,
        sum(char.isupper() for char in text) / size,
        sum(not (char.isalnum() or char.isspace()) for char in text) / size,
    ]
