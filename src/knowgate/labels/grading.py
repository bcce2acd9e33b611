"""How far graders agree on the same answers: share of equal verdicts and Cohen's kappa."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol

from knowgate.core.text import get_gold_letter, grade_choice, grade_contains, is_exact_match, normalize
from knowgate.data.runs.rows import LabelRow
from knowgate.errors import UnknownName
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.proportions import GraderAgreement, measure_agreement
from knowgate.types import Model, Prompt, Question

YES_PATTERN = re.compile(r"\b(1|yes|true)\b|是|包含|蕴含", re.IGNORECASE)
NO_PATTERN = re.compile(r"\b(0|no|false|not)\b|否|不", re.IGNORECASE)
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
            return Grade(None if get_gold_letter(question) is None else grade_choice(answer, question))
        if not has_gold_answer(question):
            return Grade(None)
        if self.name == "exact":
            return Grade(is_exact_match(answer, question.answers))
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
        prompts = {self._prompt(answer, question): None for answer, question in pairs if has_gold_answer(question)}
        asked = list(prompts)
        said = self.model.generate([Prompt(text) for text in asked], max_tokens=VERDICT_TOKENS) if asked else []
        verdicts = {text: _read_verdict(row[0].text) for text, row in zip(asked, said, strict=True)}
        return [
            verdicts[self._prompt(answer, question)] if has_gold_answer(question) else Grade(None)
            for answer, question in pairs
        ]

    def _prompt(self, answer: str, question: Question) -> str:
        values = {"prediction": answer, "answer": " / ".join(list_gold_answers(question)), "query": question.text}
        return load_packaged_templates("judge").fill(self.style, detect_question_language(question), **values)


def _read_verdict(text: str) -> Grade:
    """The first yes or no; both or neither at once cannot be read."""
    yes, no = YES_PATTERN.search(text), NO_PATTERN.search(text)
    if yes and (not no or yes.start() < no.start()):
        return Grade(True)
    return Grade(False) if no else Grade(None, unparsable=True)


def list_gold_answers(question: Question) -> list[str]:
    """Gold answers that say something."""
    return [answer for answer in question.answers if normalize(answer)]


def has_gold_answer(question: Question) -> bool:
    return any(normalize(answer) for answer in question.answers)


def load_grader(name: str, judge: Model | None = None, style: Literal["contains", "implies"] = "implies") -> Grader:
    """The grader behind a name; `judge` needs its model."""
    if name == "judge" and judge is not None:
        return JudgeGrader(judge, style)
    if name in ("exact", "contains", "choice"):
        return StringGrader(name)  # type: ignore[arg-type]
    raise UnknownName("grader", name, ["exact", "contains", "choice", "judge (with --judge MODEL)"])


def compare_graders(rows: Iterable[LabelRow], judge: Model | None = None) -> list[GraderAgreement]:
    """Every pair of exact, contains and, if given, the judge, on the greedy closed- and open-book answers."""
    answers, questions = _answers(rows)
    graders: list[Grader] = [StringGrader("exact"), StringGrader("contains")]
    if judge is not None:
        graders += [JudgeGrader(judge, "implies"), JudgeGrader(judge, "contains")]
    verdicts = {grader.name: [grade.correct for grade in grader.grade(answers, questions)] for grader in graders}
    return [compute_agreement(one, other, verdicts[one], verdicts[other]) for one, other in combinations(verdicts, 2)]


def compute_agreement(first: str, second: str, a: Sequence[bool | None], b: Sequence[bool | None]) -> GraderAgreement:
    """Over the answers both could grade."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return measure_agreement("both", (first, second), pairs)


def _answers(rows: Iterable[LabelRow]) -> tuple[list[str], list[Question]]:
    """Greedy answers to free-text questions with gold answers; choices are graded by letter and nothing else."""
    answers, questions = [], []
    for row in rows:
        question = Question(row.question, id=row.id, answers=row.answers, lang=row.lang)
        for side in (row.closed, row.open):
            if side is not None and row.answers and not row.choices:
                answers.append(side.text)
                questions.append(question)
    return answers, questions
