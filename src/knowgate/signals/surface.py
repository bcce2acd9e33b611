"""What a question looks like, without reading it: length, script, signs. Cheap, and of no LLM."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from knowgate.text import render_choices
from knowgate.types import Question, Vector

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
