"""The labeling pipeline gives the same rows as sequential labeling, and writes what was answered."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest

from knowgate.errors import BadInput, KnowgateError
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.local_runner import LabelingPipeline, LocalRunner
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import PORTION_SIZE, group_by_length
from knowgate.models.fake import FakeModel
from knowgate.types import Passage, Question

QUESTIONS = [
    Question(f"Where is number {i}?", id=str(i), answers=("here",), contexts=(Passage(f"p{i}", "It is here."),))
    for i in range(30)
]
PLAN = LabelOptions(samples=2, max_tokens=4, layers="none")


class OnePassageIndex:
    """A retriever that finds one passage for every question."""

    name, fingerprint = "index", "index"

    def __init__(self):
        self.threads = set()

    def search(self, queries, k):
        self.threads.add(threading.current_thread().name)
        return [[Passage(query, f"{query} It is here.")] for query in queries]


def run_pipeline(labeler, questions=QUESTIONS, write=None):
    parts = []
    with LabelingPipeline(labeler, questions, write or parts.append) as work:
        sizes = list(LocalRunner(first=7, largest=7).run(questions, work))
    assert sum(sizes) == len(questions)
    return [row for part in parts for row in part.rows]


def without_seconds(rows):
    return [replace(row, seconds=0.0) for row in rows]


@pytest.mark.parametrize("mask", [False, True])
def test_the_rows_equal_those_of_sequential_labeling(mask):
    labeler = Labeler(FakeModel(), StringGrader(), PLAN.replace(mask=mask))
    assert without_seconds(run_pipeline(labeler)) == without_seconds(labeler.label(QUESTIONS).rows)


def test_the_index_is_searched_in_the_prefetch_thread():
    index = OnePassageIndex()
    labeler = Labeler(FakeModel(), StringGrader(), PLAN, retriever=index)
    rows = run_pipeline(labeler)
    assert index.threads == {"knowgate-prefetch_0"}
    assert without_seconds(rows) == without_seconds(
        Labeler(FakeModel(), StringGrader(), PLAN, retriever=OnePassageIndex()).label(QUESTIONS).rows
    )


def test_answers_before_an_interruption_are_written():
    class Dying(FakeModel):
        left = 5

        def read(self, *given):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().read(*given)

    written = []
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(Labeler(Dying(), StringGrader(), PLAN), write=written.append)
    assert [row.id for part in written for row in part.rows] == [str(i) for i in range(14)]


def test_a_write_error_ends_the_run_and_nothing_more_is_written():
    written = []

    def write(part: LabeledBatch) -> None:
        written.append(part)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_pipeline(Labeler(FakeModel(), StringGrader(), PLAN), write=write)
    assert len(written) == 1


def test_a_batch_that_cannot_be_graded_is_labeled_one_by_one():
    class Fussy(StringGrader):
        def grade(self, answers, questions):
            if any(question.id == "9" for question in questions):
                raise BadInput("nobody can grade this.")
            return super().grade(answers, questions)

    rows = run_pipeline(Labeler(FakeModel(), Fussy(), PLAN))
    assert sorted(int(row.id) for row in rows) == list(range(30))
    assert [row.id for row in rows if row.error] == ["9"]
    assert issubclass(BadInput, KnowgateError)


def test_questions_are_grouped_by_length():
    questions = [Question("x" * (1 + 37 * i % 500), id=str(i)) for i in range(10 * PORTION_SIZE)]
    order = group_by_length(questions)
    assert sorted(question.id for question in order) == sorted(question.id for question in questions)
    spans = [
        max(len(q.text) for q in order[start : start + PORTION_SIZE])
        - min(len(q.text) for q in order[start : start + PORTION_SIZE])
        for start in range(0, len(order), PORTION_SIZE)
    ]
    assert max(spans) <= 60  # of 500: each portion holds a tenth of all lengths
    assert order == group_by_length(questions)
    assert group_by_length(questions[:PORTION_SIZE]) == questions[:PORTION_SIZE]


def test_threads_switch_more_often_while_the_pipeline_runs():
    before, during = sys.getswitchinterval(), []
    labeler = Labeler(FakeModel(), StringGrader(), PLAN)
    run_pipeline(labeler, write=lambda batch: during.append(sys.getswitchinterval()))
    assert max(during) < before == sys.getswitchinterval()


def test_passages_are_selected_in_a_thread_if_the_model_allows_it(monkeypatch):
    threads, fits = [], FakeModel.fits

    def watched(self, prompts, max_tokens):
        threads.append(threading.current_thread().name)
        return fits(self, prompts, max_tokens)

    monkeypatch.setattr(FakeModel, "fits", watched)
    labeler = Labeler(FakeModel(), StringGrader(), PLAN, retriever=OnePassageIndex())
    rows = labeler.label(QUESTIONS).rows
    assert set(threads) == {"MainThread"}
    monkeypatch.setattr(FakeModel, "encodes_in_threads", True, raising=False)
    threads.clear()
    assert without_seconds(labeler.label(QUESTIONS).rows) == without_seconds(rows)
    assert len(threads) == 1
    assert threads[0].startswith("knowgate-label")
