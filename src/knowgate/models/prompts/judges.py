"""Prompts for judges: self-assessment, the fitted IK and KBM judges, and the correctness of answers."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.core.text import render_choices
from knowgate.models.prompts.answers import format_passages
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.types import LabelPrompt, Passage, Question

ARBITER_SIDES = ("memory", "documents")  # the closed-book and the open-book answer


def build_self_assessment_prompt(question: Question, known: str, unknown: str) -> LabelPrompt:
    """Ask the LLM whether it can answer; it replies with one of the words `known` and `unknown`."""
    lang = detect_question_language(question)
    templates = load_packaged_templates("self")
    text = templates.fill("assess", lang, query=question.text, known=known, unknown=unknown)
    return LabelPrompt((text,), raw=False)


def build_ik_prompt(question: Question, draft: str = "") -> str:
    """Ask the IK judge whether the LLM knows the answer, given the beginning of its answer if there is one."""
    lang, query = detect_question_language(question), render_choices(question)
    if not draft:
        return load_packaged_templates("ik").fill("bare", lang, query=query)
    return load_packaged_templates("ik").fill("drafted", lang, query=query, draft=draft)


def build_kbm_prompt(question: Question, passages: Sequence[Passage] = ()) -> str:
    """Ask the KBM judge for mastery and certainty as JSON."""
    reference = format_passages(passages) if passages else "None"
    values = {"query": render_choices(question), "reference": reference}
    return load_packaged_templates("kbm").fill("judge", detect_question_language(question), **values)


def build_correctness_prompt(question: Question, answer: str | None = None) -> str:
    """Ask whether an answer is correct; without one, whether a closed-book answer would be. Expects Yes or No."""
    lang, query = detect_question_language(question), render_choices(question)
    templates = load_packaged_templates("right")
    if answer is None:
        return templates.fill("question", lang, query=query)
    return templates.fill("answer", lang, query=query, answer=_format_answer(answer, lang))


def build_search_correctness_prompt(question: Question, answer: str) -> str:
    """Ask, given the closed-book answer, whether an answer found in documents would be correct."""
    lang, query = detect_question_language(question), render_choices(question)
    return load_packaged_templates("right").fill("search", lang, query=query, answer=_format_answer(answer, lang))


def build_arbiter_prompt(
    question: Question, closed: str, opened: str, side: str, passages: Sequence[Passage] = ()
) -> str:
    """Ask whether one of two answers is correct, showing both.

    Args:
        question: The question.
        closed: The closed-book answer.
        opened: The open-book answer.
        side: The answer to be judged: 'memory' or 'documents'.
        passages: Passages to show as well.
    """
    lang = detect_question_language(question)
    values = {"query": render_choices(question)}
    values |= {"closed": _format_answer(closed, lang), "opened": _format_answer(opened, lang)}
    if passages:
        values["passages"] = format_passages(passages)
    return load_packaged_templates("right").fill(f"{side}_read" if passages else side, lang, **values)


def _format_answer(answer: str, lang: str) -> str:
    """Return the answer, or a phrase such as '(no answer)' if it is empty."""
    return answer.strip() or load_packaged_templates("right").templates[lang]["nothing"]
