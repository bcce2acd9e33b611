"""What fitted judges are asked: IK about a question and the beginning of its answer, KBM with passages or without."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.core.text import render_choices
from knowgate.models.prompts.answers import format_passages
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.types import LabelPrompt, Passage, Question


def build_ik_prompt(question: Question, draft: str = "") -> str:
    """A user turn after which Yes or No is expected. No draft: the question alone."""
    key, query = "drafted" if draft else "bare", render_choices(question)
    values = {"draft": draft} if draft else {}
    return load_packaged_templates("ik").fill(key, detect_question_language(question), query=query, **values)


def build_kbm_prompt(question: Question, passages: Sequence[Passage] = ()) -> str:
    """A user turn after which the mastery / certainty JSON is expected."""
    reference = format_passages(passages) if passages else "None"
    query = render_choices(question)
    return load_packaged_templates("kbm").fill(
        "judge", detect_question_language(question), query=query, reference=reference
    )


def build_self_assessment_prompt(question: Question, known: str, unknown: str) -> LabelPrompt:
    """A user turn after which one of the two label words is expected."""
    language = detect_question_language(question)
    text = load_packaged_templates("self").fill("assess", language, query=question.text, known=known, unknown=unknown)
    return LabelPrompt((text,), raw=False)


ARBITER_SIDES = ("memory", "documents")  # whose answer the arbiter is asked about


def build_correctness_prompt(question: Question, answer: str | None = None) -> str:
    """A user turn after which Yes or No is expected. No answer: what is asked is whether one from memory would be."""
    lang, query = detect_question_language(question), render_choices(question)
    if answer is None:
        return load_packaged_templates("right").fill("question", lang, query=query)
    return load_packaged_templates("right").fill("answer", lang, query=query, answer=_shown(answer, lang))


def build_search_correctness_prompt(question: Question, answer: str) -> str:
    """The same about an answer that has still to be found in documents, given the one from memory."""
    lang = detect_question_language(question)
    return load_packaged_templates("right").fill(
        "search", lang, query=render_choices(question), answer=_shown(answer, lang)
    )


def build_arbiter_prompt(
    question: Question, closed: str, opened: str, side: str, passages: Sequence[Passage] = ()
) -> str:
    """The same about one of two answers, both shown; side: memory or documents."""
    lang, query = detect_question_language(question), render_choices(question)
    read = {"passages": format_passages(passages)} if passages else {}
    shown = {"closed": _shown(closed, lang), "opened": _shown(opened, lang), **read}
    return load_packaged_templates("right").fill(f"{side}_read" if passages else side, lang, query=query, **shown)


def _shown(answer: str, lang: str) -> str:
    return answer.strip() or load_packaged_templates("right").templates[lang]["nothing"]
