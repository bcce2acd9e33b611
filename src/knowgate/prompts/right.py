"""What a judge is asked about answers: whether one is right, or which of two (the arbiter's pair of questions)."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.prompts import packaged, question_language
from knowgate.prompts.answer import evidence
from knowgate.text import render_choices
from knowgate.types import Passage, Question

SIDES = ("memory", "documents")  # whose answer the arbiter is asked about


def right_text(question: Question, answer: str | None = None) -> str:
    """A user turn after which Yes or No is expected. No answer: what is asked is whether one from memory would be."""
    lang, query = question_language(question), render_choices(question)
    if answer is None:
        return packaged("right").fill("question", lang, query=query)
    return packaged("right").fill("answer", lang, query=query, answer=_shown(answer, lang))


def search_text(question: Question, answer: str) -> str:
    """The same about an answer that has still to be found in documents, given the one from memory."""
    lang = question_language(question)
    return packaged("right").fill("search", lang, query=render_choices(question), answer=_shown(answer, lang))


def arbiter_text(question: Question, closed: str, opened: str, side: str, passages: Sequence[Passage] = ()) -> str:
    """The same about one of two answers, both shown; side: memory or documents."""
    lang, query = question_language(question), render_choices(question)
    read = {"passages": evidence(passages)} if passages else {}
    shown = {"closed": _shown(closed, lang), "opened": _shown(opened, lang), **read}
    return packaged("right").fill(f"{side}_read" if passages else side, lang, query=query, **shown)


def _shown(answer: str, lang: str) -> str:
    return answer.strip() or packaged("right").templates[lang]["nothing"]
