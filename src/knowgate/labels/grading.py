"""Graders decide whether an answer is right, by string rules or by asking another LLM, the judge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from knowgate.core.text import get_gold_letter, grade_choice, grade_contains, is_exact_match, normalize
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.signals import samples
from knowgate.errors import BadSetting, UnknownName
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.types import Model, Prompt, Question, Reading

YES_PATTERN = re.compile(r"\b(1|yes|true)\b|是|包含|蕴含", re.IGNORECASE)
NO_PATTERN = re.compile(r"\b(0|no|false|not)\b|否|不", re.IGNORECASE)
JudgeStyle = Literal["contains", "implies"]
VERDICT_TOKENS = 4  # maximum length of a judge's verdict, which is a yes or a no


@dataclass(frozen=True)
class Grade:
    """The grade of one answer.

    Attributes:
        correct: Whether the answer is right; None without a gold answer, or if the judge's verdict was unreadable.
        guarded: Whether the answer contains the gold answer only because it repeats the question. It counts as wrong.
        unparsable: Whether the text of the judge contained neither yes nor no.
    """

    correct: bool | None
    guarded: bool = False
    unparsable: bool = False


class Grader(Protocol):
    """Decides whether answers are right. `name` is recorded in label rows."""

    @property
    def name(self) -> str: ...

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade `answers[i]` as an answer to `questions[i]`; returns the grades in the same order."""
        ...


@dataclass(frozen=True)
class StringGrader:
    """Grades by comparing strings.

    Attributes:
        name: `exact` (the answer equals a gold answer), `contains` (it contains one) or `choice` (it names the right
            letter). Multiple-choice questions are graded by letter under every rule.
    """

    name: Literal["exact", "contains", "choice"] = "contains"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Grade answers by comparing strings. Equal answers to a question are graded once."""
        cache: dict[tuple[str, int], Grade] = {}  # by answer and id() of the question
        grades = []
        for answer, question in zip(answers, questions, strict=True):
            key = (answer, id(question))
            if key not in cache:
                cache[key] = self._grade_answer(answer, question)
            grades.append(cache[key])
        return grades

    def _grade_answer(self, answer: str, question: Question) -> Grade:
        """Grade one answer. Without a gold answer, `correct` is None."""
        if question.choices or self.name == "choice":
            return Grade(None if get_gold_letter(question) is None else grade_choice(answer, question))
        if not any(map(normalize, question.answers)):
            return Grade(None)
        if self.name == "exact":
            return Grade(is_exact_match(answer, question.answers))
        verdict = grade_contains(answer, question)
        return Grade(verdict.correct, guarded=verdict.guarded)


@dataclass(frozen=True)
class JudgeGrader:
    """Grader that asks another LLM (the judge) whether an answer is right.

    Attributes:
        model: The judge.
        style: What the judge is asked. 'contains': does the answer contain the gold answer? The question is not shown
            (KBM, figure 13). 'implies': does the answer imply the gold answer, given the question? (DH-ICL, figure 7).
    """

    model: Model
    style: JudgeStyle = "implies"

    @property
    def name(self) -> str:
        """Name recorded in label rows: 'judge:STYLE:MODEL'."""
        return f"judge:{self.style}:{self.model.name}"

    def grade(self, answers: Sequence[str], questions: Sequence[Question]) -> list[Grade]:
        """Ask the judge whether each answer is right. Without a gold answer, there is no grade."""
        prompts = [self._make_prompt(answer, question) for answer, question in zip(answers, questions, strict=True)]
        distinct = list(dict.fromkeys(prompt for prompt in prompts if prompt is not None))
        grades: dict[str | None, Grade] = {None: Grade(None)}  # by prompt; None without a gold answer
        if distinct:
            completions = self.model.generate([Prompt(text) for text in distinct], max_tokens=VERDICT_TOKENS)
            for prompt, replies in zip(distinct, completions, strict=True):
                verdict = parse_verdict(replies[0].text)
                grades[prompt] = Grade(verdict, unparsable=verdict is None)
        return [grades[prompt] for prompt in prompts]

    def _make_prompt(self, answer: str, question: Question) -> str | None:
        """Fill the template of the judge's style, in the language of the question. None without a gold answer."""
        golds = list_gold_answers(question)
        if not golds:
            return None
        values = {"prediction": answer, "answer": " / ".join(golds), "query": question.text}
        return load_packaged_templates("judge").fill(self.style, detect_question_language(question), **values)


def parse_verdict(text: str) -> bool | None:
    """Parse the verdict of a judge: the first yes or no (or 1 or 0) in its text.

    Returns:
        True for yes, False for no, and None if the text contains neither.
    """
    yes = YES_PATTERN.search(text)
    no = NO_PATTERN.search(text)
    if yes and no:
        return yes.start() < no.start()
    if yes:
        return True
    return False if no else None


def list_gold_answers(question: Question) -> list[str]:
    """List the gold answers that are not empty after normalization."""
    return [answer for answer in question.answers if normalize(answer)]


def load_grader(name: str, judge: Model | None = None, style: JudgeStyle = "implies") -> Grader:
    """Create a grader by name.

    Args:
        name: exact, contains, choice or judge.
        judge: Model that judges; required if `name` is 'judge', otherwise ignored.
        style: What the judge is asked: does the answer contain, or imply, the gold answer?

    Raises:
        UnknownName: There is no such grader, or `judge` is missing.
    """
    if name == "judge" and judge is not None:
        return JudgeGrader(judge, style)
    if name in ("exact", "contains", "choice"):
        return StringGrader(name)  # type: ignore[arg-type]
    raise UnknownName("grader", name, ["exact", "contains", "choice", "judge (needs `judge`)"])


def load_graders(names: str, judge: Model | None = None, style: JudgeStyle = "implies") -> tuple[Grader, Grader | None]:
    """Create one or two graders by name.

    Args:
        names: One or two of exact, contains, choice and judge, separated by a comma.
        judge: Model that judges; required for 'judge'.
        style: What the judge is asked: does the answer contain, or imply, the gold answer?

    Returns:
        The grader whose verdicts count, and the second one, whose verdicts are only stored; None if none is named.

    Raises:
        BadSetting: More than two graders are named, or one is named twice.
        UnknownName: There is no such grader, or `judge` is missing.
    """
    name_list = [name.strip() for name in names.split(",")]
    if len(name_list) > 2 or len(set(name_list)) < len(name_list):
        raise BadSetting(f"grade={names!r} must name one grader, or two different ones. Example: 'contains,judge'.")
    grader, *others = [load_grader(name, judge, style) for name in name_list]
    return grader, others[0] if others else None


def make_empty_row(question: Question, lang: str, grader: Grader) -> LabelRow:
    """Make the label row of a question without any answers."""
    return LabelRow(
        id=question.id,
        question=question.text,
        lang=lang,
        answers=tuple(list_gold_answers(question)),
        choices=question.choices,
        meta=question.meta,
        grader="choice" if question.choices else grader.name,  # every grader grades multiple choice by letter
    )


def add_grades(answer: GradedAnswer, grades: Sequence[Grade], question: Question) -> GradedAnswer:
    """Return an answer with its grades, and with the mastery and certainty of its samples.

    Mastery is the share of right samples.

    Args:
        answer: Answer without grades.
        grades: Grade of the greedy answer, followed by the grades of the samples.
        question: The question, whose choices decide which sampled answers are equal.
    """
    sampled = tuple(grade.correct for grade in grades[1:])
    return replace(
        answer,
        correct=grades[0].correct,
        sample_correct=sampled,
        mastery=samples.mastery(sampled),
        certainty=samples.certainty([samples.canonical_answer(text, question) for text in answer.samples]),
    )


def add_counts(row: LabelRow, reading: Reading, grades: Sequence[Grade]) -> LabelRow:
    """Add an answer to the counts of a row: its generated tokens, and its guarded and unparsable grades.

    A guarded answer repeats the question, and so does not count as right. An unparsable verdict of a judge gives no grade.
    """
    return replace(
        row,
        guarded=row.guarded + sum(grade.guarded for grade in grades),
        unparsable=row.unparsable + sum(grade.unparsable for grade in grades),
        tokens=row.tokens + _count_generated_tokens(reading),
    )


def _count_generated_tokens(reading: Reading) -> int:
    """Return the number of tokens in the greedy answer and all samples."""
    return (reading.draft.n_tokens if reading.draft else 0) + sum(sample.n_tokens for sample in reading.samples)


def compare_answers(row: LabelRow) -> LabelRow:
    """Add to a row whether retrieval helped or hurt. The answers with and without passages are compared."""
    if row.closed is None or row.open is None:
        return row
    return replace(
        row,
        effect_mastery=samples.retrieval_effect(row.closed.mastery, row.open.mastery),
        effect_certainty=samples.retrieval_effect(row.closed.certainty, row.open.certainty),
        benefit=samples.retrieval_benefit(row.closed.correct, row.open.correct),
    )
