"""Features of the text of a question and its draft answer: length, hedging, numbers, names and overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from knowgate.core.text import tokenize
from knowgate.data.signals.question_text import NAME, NUMBER, QUESTION_FEATURES, question_features
from knowgate.types import Question, Vector

HEDGES = re.compile(
    r"\b(may|might|maybe|perhaps|possibly|probably|likely|unclear|unknown|unsure|uncertain|appears?|seems?|believed|"
    r"reportedly|approximately|around|about|various|several|depends?|varies|as of|i think|not sure|cannot|can't|sorry|"
    r"don't know|do not know|no (specific|information|definitive)|fictional|context)\b|不确定|不知道|可能|也许|大概|无法"
)
YEAR = re.compile(r"\b(1\d{3}|20\d\d)\b")
LENGTH_FEATURES = ("draft_words", "draft_sentences")
HEDGING_FEATURES = ("hedges", "hedge_at_start")
DRAFT_FEATURES = ("draft_numbers", "draft_years", "draft_names", "overlap", "capital_share", "starts_lower")
ANSWER_FEATURES = (*QUESTION_FEATURES, *LENGTH_FEATURES, *HEDGING_FEATURES, *DRAFT_FEATURES)
HEDGE_WINDOW = 80  # characters at the start of a draft in which `hedge_at_start` looks for a hedge


def answer_features(questions: Sequence[Question], drafts: Sequence[str]) -> Vector:
    """Compute the `ANSWER_FEATURES` of each question and its draft answer.

    Args:
        questions: The questions.
        drafts: Draft answer of each question.

    Returns:
        One row per question, one column per name in `ANSWER_FEATURES`.
    """
    rows = [_describe_draft(question.text, draft) for question, draft in zip(questions, drafts, strict=True)]
    n_columns = len(ANSWER_FEATURES) - len(QUESTION_FEATURES)
    draft_columns = np.array(rows, dtype=np.float32).reshape(len(questions), n_columns)
    return np.hstack([question_features(questions), draft_columns])


def _describe_draft(question: str, draft: str) -> list[float]:
    """Compute the features of a draft answer: length, hedging, numbers, names and overlap with the question."""
    words, lowered = tokenize(draft), draft.lower()
    question_words = set(tokenize(question))
    shared = sum(word in question_words for word in words)
    return [
        math.log1p(len(words)),
        math.log1p(len(re.findall(r"[.!?。！？](\s|$)", draft))),
        math.log1p(len(HEDGES.findall(lowered))),
        float(bool(HEDGES.search(lowered[:HEDGE_WINDOW]))),
        float(bool(NUMBER.search(draft))),
        float(bool(YEAR.search(draft))),
        math.log1p(len(NAME.findall(draft))),
        shared / max(1, len(words)),
        len(NAME.findall(draft)) / max(1, len(words)),
        float(draft[:1].islower()),
    ]
