"""Label runs made from recorded answers."""

from dataclasses import replace

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput
from knowgate.labels.answer_import import AnswerKeys, import_answers
from knowgate.labels.grading import StringGrader
from knowgate.types import Question

QUESTIONS = [
    Question("Capital of France?", id="1", answers=("Paris",), meta={"alone": "Lyon", "with": "Paris", "long": "Nice"}),
    Question("Capital of Peru?", id="2", answers=("Lima",), meta={"alone": "Lima", "with": "Lima", "long": "Lima"}),
]


def import_run(tmp_path, questions=QUESTIONS, extra_fields=None, closed="alone", **keys):
    folder = RunFolder(tmp_path / "run")
    answer_keys = AnswerKeys(closed, **{"open": "with", **keys})
    import_answers(
        folder,
        questions,
        StringGrader(),
        llm="x",
        data="jsonl:x",
        keys=answer_keys,
        extra_fields=extra_fields,
    )
    return folder


def test_recorded_answers_are_graded_and_compared(tmp_path):
    rows = list(import_run(tmp_path).rows())
    assert [row.closed.correct for row in rows] == [False, True]
    assert [row.benefit for row in rows] == [1, 0]
    assert rows[0].closed.tokens is None


def test_importing_again_adds_nothing(tmp_path):
    import_run(tmp_path)
    assert len(list(import_run(tmp_path).rows())) == 2


def test_without_open_book_answers_there_is_no_benefit(tmp_path):
    assert [row.benefit for row in import_run(tmp_path, open="").rows()] == [None, None]


def test_a_missing_answer_key_error_lists_the_available_keys(tmp_path):
    with pytest.raises(
        BadInput, match=r"2 of 2 .* 'nothing', .* line; the first is '1', whose text fields are: alone, long, with\."
    ):
        import_run(tmp_path, closed="nothing")


def test_nothing_is_written_if_some_questions_lack_an_answer(tmp_path):
    incomplete = [QUESTIONS[0], replace(QUESTIONS[1], meta={"alone": "Lima"})]
    with pytest.raises(
        BadInput, match=r"1 of 2 questions have no text under 'with', .* the first is '2'.* Leave them out of"
    ):
        import_run(tmp_path, questions=incomplete)
    assert not (tmp_path / "run").exists()


def test_iterative_answers_are_imported(tmp_path):
    rows = list(import_run(tmp_path, iterative="long").rows())
    assert [(row.iterative.text, row.iterative.correct) for row in rows] == [("Nice", False), ("Lima", True)]


def test_top_level_fields_are_used_and_meta_takes_precedence(tmp_path):
    fields = {"1": {"short": "Paris", "with": "Lyon"}, "2": {"short": "Cusco"}}
    rows = list(import_run(tmp_path, closed="short", extra_fields=fields).rows())
    assert [(row.closed.text, row.open.text) for row in rows] == [("Paris", "Paris"), ("Cusco", "Lima")]
    assert rows[0].meta == QUESTIONS[0].meta
