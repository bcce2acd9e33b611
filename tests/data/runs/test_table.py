"""Label runs read back: which rows, in which order, what is derived from them; and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.offline_scoring import score_gate
from tests.support.planted_run import LAYER, planted_rows
from tests.support.planted_run import write_run as planted_run
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import four_rows, trial_run


def test_grades_follow_the_rows(tmp_path):
    trial = load_label_table([trial_run(tmp_path / "run")])
    assert trial.closed_book_right.tolist() == [True, False, True, False]
    assert trial.open_book_right.tolist() == [True, True, False, False]


def test_always_retrieving_equals_closed_book_without_open_book_answers(tmp_path):
    trial = load_label_table([trial_run(tmp_path / "run", [row("a", side(True)), row("b", side(False))])])
    assert trial.open_book_right is None
    assert trial.retrieved_right.tolist() == [True, False]
    assert trial.n_without_passages == 0


def test_a_subset_has_the_grades_and_counts_of_its_rows(tmp_path):
    trial = load_label_table([trial_run(tmp_path / "run", [*four_rows(), row("q4", side(True), None)])])
    part = trial.subset(np.array([4, 1]))
    assert [each.id for each in part.rows] == [question.id for question in part.questions] == ["q4", "q1"]
    assert (part.closed_book_right.tolist(), part.open_book_right.tolist()) == ([True, False], [True, True])
    assert (part.n_without_passages, trial.subset([1, 2]).n_without_passages) == (1, 0)
    assert score_gate(part, "good").needs.tolist() == [0.2, 0.8]


def test_hidden_states_are_read_for_the_requested_layers(tmp_path):
    run = planted_run(tmp_path / "run", *planted_rows(5))
    assert set(load_label_table([run]).readings[0].hidden) == {LAYER}
    assert load_label_table([run], layers=()).readings[0].hidden == {}
    with pytest.raises(BadSetting, match=r"no hidden states named 'before\.9'"):
        load_label_table([run], layers=[9])


def test_runs_with_the_same_folder_name_are_kept_apart(tmp_path):
    runs = [trial_run(tmp_path / name / "run") for name in ("a", "b")]
    trial = load_label_table(runs)
    assert len(trial.rows) == 8
    assert score_gate(trial, "good").needs.tolist() == [0.2, 0.8, 0.2, 0.8] * 2


def test_a_run_named_twice_is_rejected(tmp_path):
    run = trial_run(tmp_path / "run")
    with pytest.raises(BadSetting, match="given twice"):
        load_label_table([run, run / ".." / "run"])


def test_an_empty_list_of_runs_is_rejected():
    with pytest.raises(BadInput, match="Give the folder of at least one"):
        load_label_table([])


def test_incompatible_runs_are_rejected_with_the_advice_of_the_caller(tmp_path):
    runs = [trial_run(tmp_path / "a", k=3), trial_run(tmp_path / "b", retriever_fingerprint="other")]
    assert len(load_label_table(runs).rows) == 8  # an evaluation does not mind
    with pytest.raises(
        BadSetting, match=r"differ in their retriever fingerprint \(.*a: None; .*b: other\)\. Keep them apart\."
    ):
        load_label_table(runs, required_equal={"retriever_fingerprint": "Keep them apart"})


def graded_twice(name, first, second):
    answer = replace(side(first), other_grades={"judge:implies:x": second})
    return replace(row(name, answer, answer), grader="contains")


@pytest.mark.parametrize("max_in_memory", [None, 1])
def test_the_verdicts_of_another_grader_can_be_used(tmp_path, max_in_memory):
    rows = [graded_twice("a", True, False), graded_twice("b", True, True), graded_twice("c", True, None)]
    run = trial_run(tmp_path / "run", rows)
    table = load_label_table([run], grader="judge", max_in_memory=max_in_memory)
    assert table.closed_book_right.tolist() == [False, True]
    assert [each.closed.correct for each in table.rows] == [False, True]
    assert table.left_out["not graded"] == 1
    assert load_label_table([run], grader="contains").closed_book_right.tolist() == [True] * 3


def test_an_unknown_grader_is_rejected_with_the_graders_of_the_rows(tmp_path):
    run = trial_run(tmp_path / "run", [graded_twice("a", True, False)])
    with pytest.raises(BadInput, match="grader='exact' graded none of them; choose one of: contains, judge:implies:x"):
        load_label_table([run], grader="exact")
