"""Label runs made from recorded answers."""

from dataclasses import replace

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput
from knowgate.labels.answer_import import ImportOptions, import_answers
from knowgate.labels.grading import StringGrader
from knowgate.types import Passage, Question

QUESTIONS = [
    Question("Capital of France?", id="1", answers=("Paris",), meta={"alone": "Lyon", "with": "Paris", "long": "Nice"}),
    Question("Capital of Peru?", id="2", answers=("Lima",), meta={"alone": "Lima", "with": "Lima", "long": "Lima"}),
]


def import_run(tmp_path, questions=QUESTIONS, extra_fields=None, closed="alone", **keys):
    folder = RunFolder(tmp_path / "run")
    options = ImportOptions(closed=closed, **{"open": "with", **keys})
    import_answers(
        folder,
        questions,
        StringGrader(),
        llm="x",
        data="jsonl:x",
        options=options,
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
    with pytest.raises(BadInput, match=r"2 of 2 .* 'nothing'\. Question '1' has these fields: alone, long, with\."):
        import_run(tmp_path, closed="nothing")


def test_nothing_is_written_if_some_questions_lack_an_answer(tmp_path):
    incomplete = [QUESTIONS[0], replace(QUESTIONS[1], meta={"alone": "Lima"})]
    with pytest.raises(
        BadInput, match=r"1 of 2 questions have no text in the field 'with'.* Question '2' has.* write an empty text"
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


def graded(number, *, closed, opened=None, **meta):
    question = QUESTIONS[number]
    return replace(question, meta={**question.meta, "correct": {"nor": closed, "oner": opened}, **meta})


def test_recorded_grades_count_and_the_string_rule_is_stored_beside_them(tmp_path):
    questions = [graded(0, closed=True, opened=False), graded(1, closed=0, opened=1)]
    keys = {"closed_correct": "correct.nor", "open_correct": "meta.correct.oner"}
    folder = import_run(tmp_path, questions, **keys)
    rows = list(folder.rows())
    assert [(row.closed.correct, row.open.correct, row.benefit) for row in rows] == [
        (True, False, -1),
        (False, True, 1),
    ]
    assert [row.closed.other_grades for row in rows] == [{"contains": False}, {"contains": True}]
    assert [row.grader for row in rows] == ["recorded", "recorded"]
    assert folder.settings()["grader"] == "recorded"


def test_answers_without_a_recorded_grade_stay_ungraded(tmp_path):
    questions = [graded(0, closed="thumbs_up"), graded(1, closed=None)]
    rows = list(import_run(tmp_path, questions, open="", closed_correct="correct.nor").rows())
    assert [row.closed.correct for row in rows] == [True, None]


def test_a_grade_key_that_no_question_has_is_reported(tmp_path):
    with pytest.raises(BadInput, match=r"no question has a grade in the field 'score'. .* alone, long, with"):
        import_run(tmp_path, closed_correct="score")


def test_log_probabilities_passages_and_costs_are_imported(tmp_path):
    tokens = [{"token": "Ly", "logprob": -0.5, "top": [["Ly", -0.5], ["Pa", -1.5]]}, {"token": "on", "logprob": -0.1}]
    meta = {"logprobs": tokens, "docs": ["Paris is a city.", {"text": "France", "title": "F"}]}
    fields = {"1": {"usage": {"prompt_tokens": 9, "completion_tokens": 2}, "ms": 0.5}}
    (row,) = import_run(
        tmp_path,
        [replace(QUESTIONS[0], meta={**QUESTIONS[0].meta, **meta})],
        fields,
        logprobs="meta.logprobs",
        passages="docs",
        open_tokens="usage",
        closed_seconds="ms",
    ).rows()
    assert [(token.text, token.logprob) for token in row.closed.tokens] == [("Ly", -0.5), ("on", -0.1)]
    assert row.closed.tokens[0].margin == pytest.approx(0.383401, abs=1e-6)
    assert [(passage.title, passage.text) for passage in row.passages] == [("", "Paris is a city."), ("F", "France")]
    assert (row.open.prompt_tokens, row.open.n_tokens, row.closed.n_tokens) == (9, 2, None)
    assert (row.closed.seconds, row.open.seconds) == (0.5, None)
    assert "logprobs" not in row.meta


def test_the_contexts_of_a_question_are_its_passages(tmp_path):
    question = replace(QUESTIONS[0], contexts=(Passage("p", "Paris"),))
    (row,) = import_run(tmp_path, [question]).rows()
    assert row.passages == question.contexts
