"""Graders: whether an answer is right, by string rules or by another LLM, and how far graders agree."""

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
    """The grade of one answer.

    Attributes:
        correct: None if there is no gold answer or the verdict of the judge could not be parsed.
        guarded: The answer contains the gold answer only because it repeats the question.
        unparsable: The verdict of the judge could not be parsed.
    """

    correct: bool | None
    guarded: bool = False
    unparsable: bool = False


class Grader(Protocol):
    """Grades answers to questions."""

    @property
    def name(self) -> str: ...

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade pairs of an answer and its question, in order."""
        ...


@dataclass(frozen=True)
class StringGrader:
    """Grades by string rules: `exact`, `contains` or `choice`.

    Multiple-choice questions are graded by letter under every rule.
    """

    name: Literal["exact", "contains", "choice"] = "contains"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade answers; equal answers to the same question, as samples often are, are graded once."""
        grades: dict[tuple[str, int], Grade] = {}
        pairs = [(answer, id(question)) for answer, question in zip(answers, questions, strict=True)]
        for pair, question in zip(pairs, questions, strict=True):
            if pair not in grades:
                grades[pair] = self._grade_answer(pair[0], question)
        return [grades[pair] for pair in pairs]

    def _grade_answer(self, answer: str, question: Question) -> Grade:
        """Grade one answer; the grade is None without a gold answer."""
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
    """Lets another LLM say whether an answer is right, at temperature 0.

    Attributes:
        model: The judge.
        style: Prompt of the judge. 'contains' leaves the question out (KBM, figure 13); 'implies' includes it
            (DH-ICL, figure 7).
    """

    model: Model
    style: Literal["contains", "implies"] = "implies"

    @property
    def name(self) -> str:
        """Name recorded in rows: the style and the judge."""
        return f"judge:{self.style}:{self.model.name}"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade answers; equal prompts are sent to the judge once."""
        pairs = list(zip(answers, questions, strict=True))
        unique = {self._make_prompt(answer, question): None for answer, question in pairs if has_gold_answer(question)}
        prompts = [Prompt(text) for text in unique]
        completions = self.model.generate(prompts, max_tokens=VERDICT_TOKENS) if prompts else []
        grades = {text: _parse_verdict(row[0].text) for text, row in zip(unique, completions, strict=True)}
        return [
            grades[self._make_prompt(answer, question)] if has_gold_answer(question) else Grade(None)
            for answer, question in pairs
        ]

    def _make_prompt(self, answer: str, question: Question) -> str:
        values = {"prediction": answer, "answer": " / ".join(list_gold_answers(question)), "query": question.text}
        return load_packaged_templates("judge").fill(self.style, detect_question_language(question), **values)


def _parse_verdict(text: str) -> Grade:
    """Parse the verdict of a judge: the first yes or no in its text."""
    yes, no = YES_PATTERN.search(text), NO_PATTERN.search(text)
    if yes and (not no or yes.start() < no.start()):
        return Grade(True)
    return Grade(False) if no else Grade(None, unparsable=True)


def list_gold_answers(question: Question) -> list[str]:
    """List the gold answers that are not empty after normalization."""
    return [answer for answer in question.answers if normalize(answer)]


def has_gold_answer(question: Question) -> bool:
    """Return whether the question has a gold answer that is not empty after normalization."""
    return any(normalize(answer) for answer in question.answers)


def load_grader(name: str, judge: Model | None = None, style: Literal["contains", "implies"] = "implies") -> Grader:
    """Create a grader by name.

    Args:
        name: exact, contains, choice or judge.
        judge: Model of the judge; needed for 'judge'.
        style: Prompt of the judge.

    Raises:
        UnknownName: There is no such grader, or `judge` is missing.
    """
    if name == "judge" and judge is not None:
        return JudgeGrader(judge, style)
    if name in ("exact", "contains", "choice"):
        return StringGrader(name)  # type: ignore[arg-type]
    raise UnknownName("grader", name, ["exact", "contains", "choice", "judge (needs `judge`)"])


# --- agreement ------------------------------------------------------------------------------------


def compare_graders(rows: Iterable[LabelRow], judge: Model | None = None) -> list[GraderAgreement]:
    """Measure how far graders agree on the greedy closed- and open-book answers.

    Args:
        rows: Label rows.
        judge: Also compare this judge, with both prompts.

    Returns:
        The agreement of each pair of graders, over the answers that both could grade.
    """
    answers, questions = _list_answers(rows)
    graders: list[Grader] = [StringGrader("exact"), StringGrader("contains")]
    if judge is not None:
        graders += [JudgeGrader(judge, "implies"), JudgeGrader(judge, "contains")]
    verdicts = {grader.name: [grade.correct for grade in grader.grade(answers, questions)] for grader in graders}
    return [
        compute_agreement(first, second, verdicts[first], verdicts[second])
        for first, second in combinations(verdicts, 2)
    ]


def compute_agreement(
    first: str, second: str, first_verdicts: Sequence[bool | None], second_verdicts: Sequence[bool | None]
) -> GraderAgreement:
    """Measure the agreement of two graders over the answers that both could grade."""
    pairs = [(a, b) for a, b in zip(first_verdicts, second_verdicts, strict=True) if a is not None and b is not None]
    return measure_agreement("both", (first, second), pairs)


def _list_answers(rows: Iterable[LabelRow]) -> tuple[list[str], list[Question]]:
    """List greedy answers to free-text questions with gold answers; graders do not differ on multiple choice."""
    answers, questions = [], []
    for row in rows:
        question = Question(row.question, id=row.id, answers=row.answers, lang=row.lang)
        for answer in (row.closed, row.open):
            if answer is not None and row.answers and not row.choices:
                answers.append(answer.text)
                questions.append(question)
    return answers, questions
