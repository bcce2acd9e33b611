"""What people ask, as questions: checked at the door, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from knowgate.doors import check_text
from knowgate.errors import BadInput
from knowgate.types import Question


def batches(questions: Iterable[str | Question], size: int, first: int | None = None) -> Iterator[list[Question]]:
    """Questions in lists of this size. first: the first ones are smaller, each twice the one before."""
    check_several(questions)
    waiting, now = iter(questions), first or size
    while taken := [as_question(question) for question in islice(waiting, now)]:
        yield taken
        now = min(size, 2 * now)


def check_several(questions: object) -> None:
    """A text is a sequence, too: of its letters."""
    if isinstance(questions, str):
        raise BadInput("questions are a list; for one question there are `answer` and `decide`.")


def as_question(question: str | Question) -> Question:
    """A question record; text is checked, not changed."""
    record = Question(question) if isinstance(question, str) else question
    if not isinstance(record, Question):
        raise BadInput(f"a question is a text or a Question, not {question!r}.")
    if not record.text.strip():
        raise BadInput("the question is empty: ask something.")
    check_text(record.text, "the question")
    return record
