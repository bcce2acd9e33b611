"""Questions as callers hand them over: by a spec, or the records themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from knowgate.datasets import load_questions
from knowgate.doors import check_text, check_whole, shown
from knowgate.errors import BadInput
from knowgate.text import LETTERS
from knowgate.types import Question

Data = str | Sequence[Question]
GIVEN = "questions"  # what a run says of its data where it was no spec


def gather_questions(data: Data, limit: int | None = None) -> list[Question]:
    """The questions of a spec, or those given; a given one without an id is called by its number, counted from 1."""
    if limit is not None:
        check_whole(limit, "the limit")
    if isinstance(data, str):
        return load_questions(data, limit)
    wrong = [one for one in data if not isinstance(one, Question)]
    if wrong:
        raise BadInput(f"{wrong[0]!r} is no Question: to label it takes Question('...', answers=('...',)).")
    questions = [replace(one, id=one.id or str(number)) for number, one in enumerate(data[:limit], start=1)]
    _check(questions)
    return questions


def data_name(data: Data) -> str:
    """How a run calls its data."""
    return data if isinstance(data, str) else GIVEN


def _check(questions: Sequence[Question]) -> None:
    if not questions:
        raise BadInput("there are no questions: the list is empty.")
    seen: set[str] = set()
    for question in questions:
        if not question.text.strip():
            raise BadInput(f"question {shown(question.id)} is empty.")
        for text in (question.text, question.id, *question.answers, *question.choices):
            check_text(text, f"question {shown(question.id)}")
        if len(question.choices) > len(LETTERS):
            raise BadInput(f"question {shown(question.id)} has more choices than there are letters ({len(LETTERS)}).")
        if question.id in seen:
            raise BadInput(f"two questions have the id {shown(question.id)}; ids must be unique.")
        seen.add(question.id)
