"""Follow-ups: which questions lean on what was said before, and how the LLM is asked to make them stand alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from knowgate.prompts import detect_language, packaged
from knowgate.types import Prompt

MARKS = {"en": ("Q", "A"), "zh": ("问", "答")}
SHORT = 3  # words: "In France, too?" leans on something
ASKS = re.compile(r"^(who|what|when|where|which|whose|how)\b", re.IGNORECASE)
BEGINS = re.compile(
    r"^(and|but|or|so|then|also|what about|how about|why|why not|how so|really|what else|who else|which one|same)\b"
    r"|^(那么?|还有|然后|为什么|为何|而|以及|另外|同样|它|他|她|这|该)",
    re.IGNORECASE,
)
POINTS = re.compile(
    r"\b(he|she|it|they|him|her|them|his|hers|its|their|theirs|this|that|these|those|there|then|one|ones|former|latter)\b"
    r"|(它|他|她|他们|她们|它们|这个|那个|这些|那些|其|那里|那时|前者|后者)"
    r"|\b(year|month|week|day|one) (before|after)\b",
    re.IGNORECASE,
)
ENDS = re.compile(r"呢[？?]?$|(\b(too|as well|instead)\?$)", re.IGNORECASE)


class Exchange(NamedTuple):
    """A question as it was understood, and what was answered."""

    asked: str
    answered: str


def leans_on_before(text: str) -> bool:
    """Whether a question can hardly be understood alone. Rather too often: what stands alone is rewritten as it is."""
    said = text.strip()
    is_short = len(said.split()) <= SHORT and detect_language(said) == "en" and not ASKS.match(said)
    return is_short or any(pattern.search(said) for pattern in (BEGINS, POINTS, ENDS))


def condense_prompt(exchanges: Sequence[Exchange], text: str) -> Prompt:
    lang = detect_language(text)
    asked, answered = MARKS[lang]
    turns = "\n".join(f"{asked}: {one.asked}\n{answered}: {one.answered}" for one in exchanges)
    return Prompt(packaged("condense").fill("condense", lang, turns=turns, query=text))
