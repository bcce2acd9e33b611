"""Prompts for judges, which assess what the LLM knows or whether an answer is correct.

The LLM can judge itself (self-assessment). The IK judge ("I know") and the KBM judge ("knowledge boundary model") are
fine-tuned to predict whether the LLM knows the answer to a question.
"""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.core.text import render_choices
from knowgate.models.prompts.answers import format_passages
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.types import LabelPrompt, Passage, Question

ARBITER_SIDES = ("memory", "documents")  # 'memory' is the closed-book answer, 'documents' the open-book answer


def build_self_assessment_prompt(question: Question, known: str, unknown: str) -> LabelPrompt:
    """Build the prompt that asks the LLM whether it can answer a question without passages.

    Args:
        question: The question.
        known: The word that the LLM should reply if it knows the answer.
        unknown: The word that it should reply otherwise.
    """
    lang = detect_question_language(question)
    templates = load_packaged_templates("self")
    text = templates.fill("assess", lang, query=question.text, known=known, unknown=unknown)
    return LabelPrompt((text,), raw=False)


def build_ik_prompt(question: Question, draft: str = "") -> str:
    """Build the prompt that asks the IK ("I know") judge whether the LLM knows the answer.

    Args:
        question: The question.
        draft: The beginning of the LLM's answer, to show to the judge; empty to show only the question.
    """
    lang, query = detect_question_language(question), render_choices(question)
    if not draft:
        return load_packaged_templates("ik").fill("bare", lang, query=query)
    return load_packaged_templates("ik").fill("drafted", lang, query=query, draft=draft)


def build_kbm_prompt(question: Question, passages: Sequence[Passage] = ()) -> str:
    """Build the prompt for the KBM (knowledge boundary model) judge.

    The judge replies in JSON how well the LLM masters the question (mastery) and how sure it is (certainty).
    """
    reference = format_passages(passages) if passages else "None"
    values = {"query": render_choices(question), "reference": reference}
    return load_packaged_templates("kbm").fill("judge", detect_question_language(question), **values)


def build_correctness_prompt(question: Question, answer: str | None = None) -> str:
    """Build the prompt that asks a judge whether the closed-book answer is correct. The judge replies Yes or No.

    Args:
        question: The question.
        answer: The answer to judge; None to ask whether the LLM would answer the question correctly.
    """
    lang, query = detect_question_language(question), render_choices(question)
    templates = load_packaged_templates("right")
    if answer is None:
        return templates.fill("question", lang, query=query)
    return templates.fill("answer", lang, query=query, answer=_format_answer(answer, lang))


def build_search_correctness_prompt(question: Question, answer: str) -> str:
    """Build the prompt that asks whether an answer found in documents would be correct.

    Args:
        question: The question.
        answer: The LLM's closed-book answer, which the judge sees.
    """
    lang, query = detect_question_language(question), render_choices(question)
    return load_packaged_templates("right").fill("search", lang, query=query, answer=_format_answer(answer, lang))


def build_arbiter_prompt(
    question: Question, closed: str, opened: str, side: str, passages: Sequence[Passage] = ()
) -> str:
    """Build the prompt that shows a judge the closed-book and the open-book answer, and asks whether one is correct.

    Args:
        question: The question.
        closed: The closed-book answer.
        opened: The open-book answer.
        side: Which answer to judge: 'memory' (closed-book) or 'documents' (open-book).
        passages: Retrieved passages to show to the judge; empty to show only the two answers.
    """
    lang = detect_question_language(question)
    values = {"query": render_choices(question)}
    values |= {"closed": _format_answer(closed, lang), "opened": _format_answer(opened, lang)}
    if passages:
        values["passages"] = format_passages(passages)
    key = f"{side}_read" if passages else side  # templates named *_read show the passages too
    return load_packaged_templates("right").fill(key, lang, **values)


def _format_answer(answer: str, lang: str) -> str:
    """Return the answer, or a phrase such as '(no answer)' in the prompt's language if it is empty."""
    return answer.strip() or load_packaged_templates("right").templates[lang]["nothing"]
