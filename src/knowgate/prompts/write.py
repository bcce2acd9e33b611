"""How the LLM is asked for a question that a passage answers, and what it says is read back."""

from __future__ import annotations

import re
from typing import NamedTuple

from knowgate.prompts import detect_language, packaged
from knowgate.types import Passage, Prompt

ASKED = re.compile(r"^\s*(?:question|问题)\s*[:：]", re.IGNORECASE)
ANSWERED = re.compile(r"\n?\s*(?:answer|答案)\s*[:：]", re.IGNORECASE)
NEXT = re.compile(r"\n\s*\n|\n\s*(?:text|question|文字|问题)\s*[:：]", re.IGNORECASE)


class Written(NamedTuple):
    """A question with its short answer; either may be empty."""

    question: str
    answer: str


def write_prompt(passage: Passage, *, raw: bool = False) -> Prompt:
    """raw: as a text to be continued, which small local models are better at than at following an instruction."""
    titled = passage.title and not passage.text.lstrip("# ").startswith(passage.title)
    shown = " ".join((f"{passage.title}: " if titled else "").split() + passage.text.split())
    return Prompt(packaged("write").fill("write", detect_language(passage.text), passage=shown), raw=raw)


def read_written(text: str) -> Written:
    """What stands before and after the word 'Answer:', each up to where the LLM goes on to something else."""
    asked, _, answered = ANSWERED.sub("\0", ASKED.sub("", text), count=1).partition("\0")
    return Written(_first(asked), _first(answered).split("\n")[0].strip().rstrip(".。"))


def _first(text: str) -> str:
    return " ".join(NEXT.split(text.strip(), maxsplit=1)[0].split("\n")[0].split())
