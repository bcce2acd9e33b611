"""Runs from recorded answers."""

from dataclasses import replace

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput
from knowgate.labels.answer_import import import_answers
from knowgate.labels.grading import StringGrader
from knowgate.types import Question

QUESTIONS = [
    Question("Capital of France?", id="1", answers=("Paris",), meta={"alone": "Lyon", "with": "Paris", "long": "Nice"}),
    Question("Capital of Peru?", id="2", answers=("Lima",), meta={"alone": "Lima", "with": "Lima", "long": "Lima"}),
]


def imported(tmp_path, closed="alone", opened="with", questions=QUESTIONS, **more):
    folder = RunFolder(tmp_path / "run")
    import_answers(folder, questions, StringGrader(), llm="x", data="jsonl:x", closed=closed, opened=opened, **more)
    return folder


def test_recorded_answers_are_graded_and_compared(tmp_path):
    rows = list(imported(tmp_path).rows())
    assert [row.closed.correct for row in rows] == [False, True]
    assert [row.benefit for row in rows] == [1, 0]
    assert rows[0].closed.tokens is None


def test_importing_again_adds_nothing(tmp_path):
    imported(tmp_path)
    assert len(list(imported(tmp_path).rows())) == 2


def test_without_open_book_answers_there_is_no_benefit(tmp_path):
    assert [row.benefit for row in imported(tmp_path, opened="").rows()] == [None, None]


def test_a_missing_answer_names_the_keys_there_are(tmp_path):
    with pytest.raises(BadInput, match=r"2 of 2 .* 'nothing', .* meta; first '1', which has: alone, long, with\."):
        imported(tmp_path, closed="nothing")


def test_answers_that_some_questions_lack_are_counted_and_nothing_is_written(tmp_path):
    holed = [QUESTIONS[0], replace(QUESTIONS[1], meta={"alone": "Lima"})]
    with pytest.raises(BadInput, match=r"1 of 2 questions have no text under 'with', .* first '2'.* Leave them out of"):
        imported(tmp_path, questions=holed)
    assert not (tmp_path / "run").exists()


def test_answers_after_several_rounds_of_retrieval_come_along(tmp_path):
    rows = list(imported(tmp_path, iterative="long").rows())
    assert [(row.iterative.text, row.iterative.correct) for row in rows] == [("Nice", False), ("Lima", True)]


def test_answers_beside_the_question_count_and_those_in_its_meta_go_first(tmp_path):
    beside = {"1": {"short": "Paris", "with": "Lyon"}, "2": {"short": "Cusco"}}
    rows = list(imported(tmp_path, closed="short", beside=beside).rows())
    assert [(row.closed.text, row.open.text) for row in rows] == [("Paris", "Paris"), ("Cusco", "Lima")]
    assert rows[0].meta == QUESTIONS[0].meta
