"""Follow-ups: which questions lean on what was said before, and how the LLM is asked to make them stand alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from knowgate.models.prompts.templates import detect_language, load_packaged_templates
from knowgate.types import Passage, Prompt

TURN_MARKS = {"en": ("Q", "A"), "zh": ("问", "答")}
SHORT_QUESTION_WORDS = 3  # words: "In France, too?" leans on something
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


class Exchange(NamedTuple):
    """A question as it was understood, and what was answered."""

    asked: str
    answered: str


def is_follow_up(text: str) -> bool:
    """Whether a question can hardly be understood alone. Rather too often: what stands alone is rewritten as it is."""
    said = text.strip()
    is_short = (
        len(said.split()) <= SHORT_QUESTION_WORDS
        and detect_language(said) == "en"
        and not QUESTION_WORD_PATTERN.match(said)
    )
    return is_short or any(
        pattern.search(said) for pattern in (FOLLOW_UP_START_PATTERN, REFERENCE_PATTERN, FOLLOW_UP_END_PATTERN)
    )


def build_condense_prompt(exchanges: Sequence[Exchange], text: str) -> Prompt:
    lang = detect_language(text)
    asked, answered = TURN_MARKS[lang]
    turns = "\n".join(f"{asked}: {one.asked}\n{answered}: {one.answered}" for one in exchanges)
    return Prompt(load_packaged_templates("condense").fill("condense", lang, turns=turns, query=text))


QUESTION_LABEL_PATTERN = re.compile(r"^\s*(?:question|问题)\s*[:：]", re.IGNORECASE)
ANSWER_LABEL_PATTERN = re.compile(r"\n?\s*(?:answer|答案)\s*[:：]", re.IGNORECASE)
NEXT_ITEM_PATTERN = re.compile(r"\n\s*\n|\n\s*(?:text|question|文字|问题)\s*[:：]", re.IGNORECASE)


class GeneratedQuestion(NamedTuple):
    """A question with its short answer; either may be empty."""

    question: str
    answer: str


def build_question_prompt(passage: Passage, *, raw: bool = False) -> Prompt:
    """raw: as a text to be continued, which small local models are better at than at following an instruction."""
    titled = passage.title and not passage.text.lstrip("# ").startswith(passage.title)
    shown = " ".join((f"{passage.title}: " if titled else "").split() + passage.text.split())
    return Prompt(load_packaged_templates("write").fill("write", detect_language(passage.text), passage=shown), raw=raw)


def parse_generated_question(text: str) -> GeneratedQuestion:
    """What stands before and after the word 'Answer:', each up to where the LLM goes on to something else."""
    asked, _, answered = ANSWER_LABEL_PATTERN.sub("\0", QUESTION_LABEL_PATTERN.sub("", text), count=1).partition("\0")
    return GeneratedQuestion(_first(asked), _first(answered).split("\n")[0].strip().rstrip(".。"))


def _first(text: str) -> str:
    return " ".join(NEXT_ITEM_PATTERN.split(text.strip(), maxsplit=1)[0].split("\n")[0].split())
