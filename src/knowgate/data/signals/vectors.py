"""Vectors that fitted gates read: hidden states, embeddings and wording of question and draft, and surface features."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from knowgate.core.text import cut_answer, render_choices
from knowgate.errors import UnsupportedSignal
from knowgate.retrieval.embeddings import check_vectors
from knowgate.types import Embedder, Question, Reading, Vector

WORD_OR_SYMBOL = re.compile(r"[A-Za-z0-9]+|\S")
SURFACE_WIDTH = 9  # features per question
WORDING_WIDTH = 2048  # columns; 4,096 rank no better on the train rows of recorded LLMs
NGRAM_SIZES = (2, 3, 4)  # characters
CJK = ("\u4e00", "\u9fff")


def stack_hidden_states(readings: Sequence[Reading], layer: int, position: str) -> Vector:
    """Stack the hidden states of a layer into a matrix with one row per reading.

    Args:
        readings: Readings with hidden states.
        layer: Layer number.
        position: 'pre' for the last prompt token, 'post' for the last drafted token.
    """
    states = [(reading.hidden if position == "pre" else reading.hidden_after).get(layer) for reading in readings]
    present = [state for state in states if state is not None]
    if len(present) < len(states):
        raise UnsupportedSignal(
            f"the hidden states of layer {layer} at the last {'prompt' if position == 'pre' else 'drafted'} token are missing. "
            f"Run `knowgate label` with layers='{layer}', or use an hf:, gguf: or smollm model.",
            brief=f"no hidden states of layer {layer}",
        )
    return np.stack(present)


def draft_texts(readings: Sequence[Reading]) -> list[str]:
    """Return the draft (answer without passages) of each reading, as text. Of a very long one, return the beginning."""
    if any(reading.draft is None for reading in readings):
        raise UnsupportedSignal(
            "the gate needs a draft (a short answer without passages), but there is none. Use another model backend."
        )
    return [cut_answer(reading.draft.text) if reading.draft else "" for reading in readings]


def text_features(embedder: Embedder, questions: Sequence[Question], texts: Sequence[str], max_words: int) -> Vector:
    """Join two embeddings per question: of the question alone, and of the question with its draft.

    Args:
        embedder: Sentence embedding.
        questions: The questions.
        texts: Draft of each question.
        max_words: Number of words of the draft that are used.
    """
    queries = [render_choices(question) for question in questions]
    with_drafts = [f"{query}\n{truncate_words(text, max_words)}" for query, text in zip(queries, texts, strict=True)]
    vectors = [check_vectors(embedder.embed(inputs), len(inputs)) for inputs in (queries, with_drafts)]
    return np.hstack(vectors).astype(np.float32)


def hash_wording(texts: Sequence[str]) -> Vector:
    """Represent the wording of each text by counts of its character n-grams (feature hashing). Rows have length 1."""
    counts = np.zeros((len(texts), WORDING_WIDTH), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        for ngram in _iterate_ngrams(text):
            code = zlib.crc32(ngram.encode())
            # The highest bit of the hash chooses the sign, so that n-grams with the same index cancel out on average.
            row[code % WORDING_WIDTH] += 1 if code >> 31 else -1
    counts /= np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)
    return counts


def _iterate_ngrams(text: str) -> Iterator[str]:
    """Yield the character n-grams of each word, in lower case. Spaces mark the ends of a word."""
    for word in text.lower().split():
        padded = f" {word} "
        for size in NGRAM_SIZES:
            for start in range(len(padded) - size + 1):
                yield padded[start : start + size]


def truncate_words(text: str, n: int) -> str:
    """Return the first n words or symbols, as an estimate of n tokens."""
    ends = [match.end() for match in WORD_OR_SYMBOL.finditer(text)][:n]
    return text[: ends[-1]].strip() if ends else ""


def surface_features(questions: Sequence[Question]) -> Vector:
    """Compute `SURFACE_WIDTH` cheap features per question from its text and choices: length, script, punctuation."""
    texts = [render_choices(question) if question.choices else question.text for question in questions]
    return np.array([_compute_surface(text) for text in texts], dtype=np.float32)


def _compute_surface(text: str) -> list[float]:
    """Compute the surface features of a text. Fitted gates rely on their order."""
    words = text.split()
    size = max(len(text), 1)
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        size / max(len(words), 1),  # characters per word
        float(text.count("\n")),
        float(text.rstrip().endswith(("?", "？"))),
        # Shares of Chinese characters, digits, capitals and punctuation.
        sum(CJK[0] <= char <= CJK[1] for char in text) / size,
        sum(char.isdigit() for char in text) / size,
        sum(char.isupper() for char in text) / size,
        sum(not (char.isalnum() or char.isspace()) for char in text) / size,
    ]
