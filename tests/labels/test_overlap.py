"""Labelling in threads: the same rows in the same order, and what was answered is kept whatever happens next."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from knowgate.errors import BadInput, KnowgateError
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.local_runner import LabelingPipeline, LocalRunner
from knowgate.labels.options import LabelPlan
from knowgate.labels.run import PORTION_SIZE, group_by_length
from knowgate.models.fake import FakeModel
from knowgate.types import Passage, Question

QUESTIONS = [
    Question(f"Where is number {i}?", id=str(i), answers=("here",), contexts=(Passage(f"p{i}", "It is here."),))
    for i in range(30)
]
PLAN = LabelPlan(samples=2, max_tokens=4)


class Shelf:
    """A retriever that finds one passage for every question."""

    name, fingerprint = "shelf", "shelf"

    def __init__(self):
        self.threads = set()

    def search(self, queries, k):
        self.threads.add(threading.current_thread().name)
        return [[Passage(query, f"{query} It is here.")] for query in queries]


def labelled(labeller, questions=QUESTIONS, keep=None):
    parts = []
    with LabelingPipeline(labeller, questions, keep or parts.append) as work:
        sizes = list(LocalRunner(first=7, largest=7).run(questions, work))
    assert sum(sizes) == len(questions)
    return [row for part in parts for row in part.rows]


def timeless(rows):
    return [replace(row, seconds=0.0) for row in rows]


@pytest.mark.parametrize("mask", [False, True])
def test_rows_are_those_of_one_batch_after_another(mask):
    labeller = Labeler(FakeModel(), StringGrader(), replace(PLAN, mask=mask))
    assert timeless(labelled(labeller)) == timeless(labeller.label(QUESTIONS).rows)


def test_an_index_is_searched_beside_the_llm():
    shelf = Shelf()
    labeller = Labeler(FakeModel(), StringGrader(), PLAN, retriever=shelf)
    rows = labelled(labeller)
    assert shelf.threads == {"knowgate-ahead"}
    assert timeless(rows) == timeless(
        Labeler(FakeModel(), StringGrader(), PLAN, retriever=Shelf()).label(QUESTIONS).rows
    )


def test_what_was_answered_before_an_interruption_is_kept():
    class Dying(FakeModel):
        left = 5

        def read(self, *given):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().read(*given)

    kept = []
    with pytest.raises(KeyboardInterrupt):
        labelled(Labeler(Dying(), StringGrader(), PLAN), keep=kept.append)
    assert [row.id for part in kept for row in part.rows] == [str(i) for i in range(14)]


def test_an_error_while_keeping_ends_the_run_and_nothing_more_is_kept():
    kept = []

    def keep(part: LabeledBatch) -> None:
        kept.append(part)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        labelled(Labeler(FakeModel(), StringGrader(), PLAN), keep=keep)
    assert len(kept) == 1


def test_a_batch_that_cannot_be_graded_is_labelled_one_by_one():
    class Fussy(StringGrader):
        def grade(self, answers, questions):
            if any(question.id == "9" for question in questions):
                raise BadInput("nobody can grade this.")
            return super().grade(answers, questions)

    rows = labelled(Labeler(FakeModel(), Fussy(), PLAN))
    assert sorted(int(row.id) for row in rows) == list(range(30))
    assert [row.id for row in rows if row.error] == ["9"]
    assert issubclass(BadInput, KnowgateError)


def test_a_run_is_sorted_by_length_in_portions():
    questions = [Question("x" * (1 + 37 * i % 500), id=str(i)) for i in range(10 * PORTION_SIZE)]
    order = group_by_length(questions)
    assert sorted(question.id for question in order) == sorted(question.id for question in questions)
    spans = [
        max(len(q.text) for q in order[place : place + PORTION_SIZE])
        - min(len(q.text) for q in order[place : place + PORTION_SIZE])
        for place in range(0, len(order), PORTION_SIZE)
    ]
    assert max(spans) <= 60  # of 500: each portion holds a tenth of all lengths
    assert order == group_by_length(questions)
    assert group_by_length(questions[:PORTION_SIZE]) == questions[:PORTION_SIZE]
