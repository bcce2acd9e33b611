"""Graders: was an answer right? By string rules, or by another LLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from knowgate.errors import UnknownName
from knowgate.prompts import packaged, question_language
from knowgate.text import gold_letter, grade_choice, grade_contains, is_exact, normalise
from knowgate.types import Model, Prompt, Question

YES = re.compile(r"\b(1|yes|true)\b|是|包含|蕴含", re.IGNORECASE)
NO = re.compile(r"\b(0|no|false|not)\b|否|不", re.IGNORECASE)
VERDICT_TOKENS = 4


@dataclass(frozen=True)
class Grade:
    """correct is None when there is no gold answer, or when a judge's verdict could not be read."""

    correct: bool | None
    guarded: bool = False
    unparsable: bool = False


class Grader(Protocol):
    """Grades (answer, question) pairs, in order."""

    @property
    def name(self) -> str: ...

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]: ...


@dataclass(frozen=True)
class StringGrader:
    """`exact`, `contains` or `choice`, as METHODS of the papers have them.

    Multiple-choice questions are graded by letter whatever the rule: their answer is a letter.
    """

    name: Literal["exact", "contains", "choice"] = "contains"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Sampled answers to a question are often the same: each is graded once."""
        known: dict[tuple[str, int], Grade] = {}
        pairs = [(answer, id(question)) for answer, question in zip(answers, questions, strict=True)]
        for pair, question in zip(pairs, questions, strict=True):
            if pair not in known:
                known[pair] = self._one(pair[0], question)
        return [known[pair] for pair in pairs]

    def _one(self, answer: str, question: Question) -> Grade:
        if question.choices or self.name == "choice":
            return Grade(None if gold_letter(question) is None else grade_choice(answer, question))
        if not has_gold(question):
            return Grade(None)
        if self.name == "exact":
            return Grade(is_exact(answer, question.answers))
        verdict = grade_contains(answer, question)
        return Grade(verdict.correct, guarded=verdict.guarded)


@dataclass(frozen=True)
class JudgeGrader:
    """Another LLM says whether the prediction is right, at temperature 0.

    style 'contains': KBM Figure 13, the question left out on purpose; 'implies': DH-ICL Figure 7, with the question.
    Equal predictions for one question are asked once.
    """

    model: Model
    style: Literal["contains", "implies"] = "implies"

    @property
    def name(self) -> str:
        return f"judge:{self.style}:{self.model.name}"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        pairs = list(zip(answers, questions, strict=True))
        prompts = {self._prompt(answer, question): None for answer, question in pairs if has_gold(question)}
        asked = list(prompts)
        said = self.model.generate([Prompt(text) for text in asked], max_tokens=VERDICT_TOKENS) if asked else []
        verdicts = {text: _read_verdict(row[0].text) for text, row in zip(asked, said, strict=True)}
        return [
            verdicts[self._prompt(answer, question)] if has_gold(question) else Grade(None)
            for answer, question in pairs
        ]

    def _prompt(self, answer: str, question: Question) -> str:
        values = {"prediction": answer, "answer": " / ".join(golds(question)), "query": question.text}
        return packaged("judge").fill(self.style, question_language(question), **values)


def _read_verdict(text: str) -> Grade:
    """The first yes or no; both or neither at once cannot be read."""
    yes, no = YES.search(text), NO.search(text)
    if yes and (not no or yes.start() < no.start()):
        return Grade(True)
    return Grade(False) if no else Grade(None, unparsable=True)


def golds(question: Question) -> list[str]:
    """Gold answers that say something."""
    return [answer for answer in question.answers if normalise(answer)]


def has_gold(question: Question) -> bool:
    return any(normalise(answer) for answer in question.answers)


def load_grader(name: str, judge: Model | None = None, style: Literal["contains", "implies"] = "implies") -> Grader:
    """The grader behind a name; `judge` needs its model."""
    if name == "judge" and judge is not None:
        return JudgeGrader(judge, style)
    if name in ("exact", "contains", "choice"):
        return StringGrader(name)  # type: ignore[arg-type]
    raise UnknownName("grader", name, ["exact", "contains", "choice", "judge (with --judge MODEL)"])
