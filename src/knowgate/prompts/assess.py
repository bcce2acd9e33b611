"""The question put to the LLM about itself: can it answer?"""

from __future__ import annotations

from knowgate.prompts import packaged, question_language
from knowgate.types import LabelPrompt, Question


def self_assessment(question: Question, known: str, unknown: str) -> LabelPrompt:
    """A user turn after which one of the two label words is expected."""
    language = question_language(question)
    text = packaged("self").fill("assess", language, query=question.text, known=known, unknown=unknown)
    return LabelPrompt((text,), raw=False)
