"""What fitted judges are asked: IK about a question and the beginning of its answer, KBM with passages or without."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.prompts import packaged, question_language
from knowgate.prompts.answer import evidence
from knowgate.text import render_choices
from knowgate.types import Passage, Question


def ik_text(question: Question, draft: str = "") -> str:
    """A user turn after which Yes or No is expected. No draft: the question alone."""
    key, query = "drafted" if draft else "bare", render_choices(question)
    values = {"draft": draft} if draft else {}
    return packaged("ik").fill(key, question_language(question), query=query, **values)


def kbm_text(question: Question, passages: Sequence[Passage] = ()) -> str:
    """A user turn after which the mastery / certainty JSON is expected."""
    reference = evidence(passages) if passages else "None"
    query = render_choices(question)
    return packaged("kbm").fill("judge", question_language(question), query=query, reference=reference)
