"""How far graders agree on the same answers: share of equal verdicts and Cohen's kappa."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from knowgate.labels.grading import Grader, JudgeGrader, StringGrader
from knowgate.runs import LabelRow
from knowgate.statistics import Agreement, agreement
from knowgate.types import Model, Question


def compare_graders(rows: Iterable[LabelRow], judge: Model | None = None) -> list[Agreement]:
    """Every pair of exact, contains and, if given, the judge, on the greedy closed- and open-book answers."""
    answers, questions = _answers(rows)
    graders: list[Grader] = [StringGrader("exact"), StringGrader("contains")]
    if judge is not None:
        graders += [JudgeGrader(judge, "implies"), JudgeGrader(judge, "contains")]
    verdicts = {grader.name: [grade.correct for grade in grader.grade(answers, questions)] for grader in graders}
    return [agree(one, other, verdicts[one], verdicts[other]) for one, other in combinations(verdicts, 2)]


def agree(first: str, second: str, a: Sequence[bool | None], b: Sequence[bool | None]) -> Agreement:
    """Over the answers both could grade."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return agreement("both", (first, second), pairs)


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
