"""Prompts about questions: write or rewrite one, and ask a judge or the LLM itself whether it knows the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from knowgate.core.text import render_choices
from knowgate.models.prompts.answers import format_passages
from knowgate.models.prompts.templates import detect_language, detect_question_language, load_packaged_templates
from knowgate.types import LabelPrompt, Passage, Prompt, Question

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
    if not draft:
        return _fill("ik", "bare", question)
    return _fill("ik", "drafted", question, draft=draft)


def build_kbm_prompt(question: Question, passages: Sequence[Passage] = ()) -> str:
    """Build the prompt for the KBM judge (knowledge boundary model).

    The judge says how well the LLM knows the answer.

    Args:
        question: The question.
        passages: Retrieved passages to show to the judge; empty to show only the question.
    """
    return _fill("kbm", "judge", question, reference=format_passages(passages) if passages else "None")


def build_correctness_prompt(question: Question, answer: str | None = None) -> str:
    """Build the prompt that asks a judge whether the closed-book answer is correct. The judge replies Yes or No.

    Args:
        question: The question.
        answer: The answer to judge; None to ask whether the LLM would answer the question correctly.
    """
    if answer is None:
        return _fill("right", "question", question)
    return _fill("right", "answer", question, answer=_format_answer(answer, question))


def build_search_correctness_prompt(question: Question, answer: str) -> str:
    """Build the prompt that asks a judge whether a search would give a correct answer.

    Args:
        question: The question.
        answer: The LLM's closed-book answer.
    """
    return _fill("right", "search", question, answer=_format_answer(answer, question))


def build_arbiter_prompt(
    question: Question, closed_book: str, open_book: str, side: str, passages: Sequence[Passage] = ()
) -> str:
    """Build the prompt that asks a judge whether one of two answers is correct.

    Args:
        question: The question.
        closed_book: The closed-book answer, which the LLM gave without passages.
        open_book: The open-book answer, which it gave after reading retrieved passages.
        side: Which of the two answers to judge: 'memory' (closed-book) or 'documents' (open-book).
        passages: Retrieved passages to show to the judge; empty to show only the two answers.
    """
    answers = {"closed": _format_answer(closed_book, question), "opened": _format_answer(open_book, question)}
    if not passages:
        return _fill("right", side, question, **answers)
    return _fill("right", f"{side}_read", question, **answers, passages=format_passages(passages))


def _fill(templates: str, key: str, question: Question, **values: str) -> str:
    """Fill a packaged template, in the language of a question, with the question and other values.

    Args:
        templates: Name of the set of templates.
        key: Name of the template.
        question: The question, which replaces the placeholder `query`.
        values: Placeholder name -> text.
    """
    lang = detect_question_language(question)
    return load_packaged_templates(templates).fill(key, lang, query=render_choices(question), **values)


def _format_answer(answer: str, question: Question) -> str:
    """Return the answer, or a phrase such as '(no answer)' for an empty one."""
    nothing = load_packaged_templates("right").templates[detect_question_language(question)]["nothing"]
    return answer.strip() or nothing


TURN_MARKS = {"en": ("Q", "A"), "zh": ("问", "答")}  # written before each question and answer of a conversation
# A question of so few words, such as "In France, too?", usually depends on an earlier question.
SHORT_QUESTION_WORDS = 3
QUESTION_WORD_PATTERN = re.compile(r"^(who|what|when|where|which|whose|how)\b", re.IGNORECASE)
FOLLOW_UP_START_PATTERN = re.compile(
    r"^(and|but|or|so|then|also|what about|how about|why|why not|how so|really|what else|who else|which one|same)\b"
    r"|^(那么?|还有|然后|为什么|为何|而|以及|另外|同样|它|他|她|这|该)",
    re.IGNORECASE,
)
REFERENCE_PATTERN = re.compile(
    r"\b(he|she|it|they|him|her|them|his|hers|its|their|theirs|this|that|these|those|there|then|one|ones|former|latter)\b"
    r"|(它|他|她|他们|她们|它们|这个|那个|这些|那些|其|那里|那时|前者|后者)"
    r"|\b(year|month|week|day|one) (before|after)\b",
    re.IGNORECASE,
)
FOLLOW_UP_END_PATTERN = re.compile(r"呢[？?]?$|(\b(too|as well|instead)\?$)", re.IGNORECASE)
QUESTION_LABEL_PATTERN = re.compile(r"^\s*(?:question|问题)\s*[:：]", re.IGNORECASE)
ANSWER_LABEL_PATTERN = re.compile(r"\n?\s*(?:answer|答案)\s*[:：]", re.IGNORECASE)


class Exchange(NamedTuple):
    """A question that can be understood on its own, and its answer.

    Both come from a conversation, or an LLM has written them about a passage.
    """

    question: str
    answer: str


def is_follow_up(text: str) -> bool:
    """Return whether a question probably depends on earlier questions.

    In doubt, the result is True.
    """
    text = text.strip()
    words = text.split() if detect_language(text) == "en" else []
    if 0 < len(words) <= SHORT_QUESTION_WORDS and not QUESTION_WORD_PATTERN.match(text):
        return True
    if len(words) == 2 and words[1].islower():  # "How heavy?", but not "What's NASA?"
        return True
    patterns = (FOLLOW_UP_START_PATTERN, REFERENCE_PATTERN, FOLLOW_UP_END_PATTERN)
    return any(pattern.search(text) for pattern in patterns)


def build_condense_prompt(exchanges: Sequence[Exchange], text: str) -> Prompt:
    """Build the prompt for rewriting a follow-up question so that it can be understood on its own.

    Args:
        exchanges: The earlier questions and answers of the conversation.
        text: The follow-up question.
    """
    lang = detect_language(text)
    question_mark, answer_mark = TURN_MARKS[lang]
    turns = "\n".join(f"{question_mark}: {turn.question}\n{answer_mark}: {turn.answer}" for turn in exchanges)
    return Prompt(load_packaged_templates("condense").fill("condense", lang, turns=turns, query=text))


def build_question_prompt(passage: Passage, *, raw: bool = False) -> Prompt:
    """Build the prompt that asks the LLM to write a question about a passage.

    Args:
        passage: The passage.
        raw: Send the prompt as plain text for the LLM to continue, without a chat template. Small models do this
            better than they follow instructions.
    """
    needs_title = passage.title and not passage.text.lstrip("# ").startswith(passage.title)
    text = f"{passage.title}: {passage.text}" if needs_title else passage.text
    one_line = " ".join(text.split())
    templates = load_packaged_templates("write")
    return Prompt(templates.fill("write", detect_language(passage.text), passage=one_line), raw=raw)


def parse_generated_question(text: str) -> Exchange:
    """Split text such as 'Question: Who? Answer: Ada.' into a question and an answer."""
    without_label = QUESTION_LABEL_PATTERN.sub("", text)
    texts = ANSWER_LABEL_PATTERN.split(without_label, maxsplit=1)
    answer = texts[1] if len(texts) > 1 else ""
    return Exchange(_first_line(texts[0]), _first_line(answer).rstrip(".。"))


def _first_line(text: str) -> str:
    """Return the first line of a text, with runs of spaces reduced to one."""
    return " ".join(text.strip().split("\n")[0].split())
