"""KBM's second judgement over recorded rows: by hand, with a judge that reads the first word of a passage."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from knowgate.data.runs.records import TableScores, read_usefulness
from knowgate.data.runs.table import load_label_table
from knowgate.errors import ArtifactError, BadSetting
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.post_retrieval import build_second_look_table, evaluate_second_look, judge_run_passages
from knowgate.stats.bootstrap import Bootstrap
from knowgate.types import Passage
from tests.support.hand_gate import graded_row, write_gate, write_rows

GOOD, BAD = (Passage("g", "good one two three"),), (Passage("b", "bad one two three"),)


@dataclass
class FirstWord:
    asked: list = field(default_factory=list)

    def are_useful(self, questions, passages):
        self.asked += [question.id for question in questions]
        return [bool(shown) and shown[0].text.startswith("good") for shown in passages]


def rows():
    """Closed and open verdicts: helped by good passages twice, hurt by bad ones, helped by a bad one."""
    cases = [("a", False, True, GOOD), ("b", False, True, GOOD), ("c", True, False, BAD), ("d", False, True, BAD)]
    return [graded_row(name, 0.8, closed, opened, passages=shown) for name, closed, opened, shown in cases]


@pytest.fixture
def run(tmp_path):
    return write_rows(tmp_path / "run", rows())


def test_dropped_passages_leave_the_closed_book_answer(run):
    trial = load_label_table([run])
    always = TableScores("always", 0.5, np.ones(4))
    (line,) = evaluate_second_look(trial, [always], np.array([True, True, False, False]), Bootstrap(4, 50))
    assert (line.once, line.twice, line.rate, line.shown) == (0.75, 0.75, 1.0, 0.5)
    assert line.random == pytest.approx(0.5 * 0.75 + 0.5 * 0.25)
    assert build_second_look_table([line]).rows[0][:4] == ("always", "100.0 %", "75.0 %", "75.0 %")


def test_skipped_questions_are_not_judged_again(run):
    trial = load_label_table([run])
    skips_c = TableScores("mine", 0.5, np.array([1.0, 1.0, 0.0, 1.0]))
    (line,) = evaluate_second_look(trial, [skips_c], np.array([True, True, True, False]), Bootstrap(4, 50))
    assert (line.once, line.twice) == (1.0, 0.75)


def test_without_open_book_answers_there_is_nothing_to_drop(tmp_path):
    trial = load_label_table([write_rows(tmp_path / "run", [graded_row("a", 0.8, False, None)])])
    with pytest.raises(BadSetting, match="with `index`"):
        evaluate_second_look(trial, [], np.array([True]), Bootstrap(1, 50))


# --- the judge's verdicts on record ---------------------------------------------------------------


def test_the_judge_is_asked_once_and_its_verdicts_are_stored(run, tmp_path):
    folder, judge = str(write_gate(tmp_path / "judge")), FirstWord()
    trial = load_label_table([run])
    first = judge_run_passages(run, trial.rows, folder, judge)
    assert first == {"a": True, "b": True, "c": False, "d": False}
    assert judge_run_passages(run, trial.rows, folder, judge) == first
    assert judge.asked == ["a", "b", "c", "d"]
    assert read_usefulness(run)[0].judge == "judge, better than without"
    judge_run_passages(run, trial.rows, f"{folder},verdict=own", judge)
    assert [record.judge for record in read_usefulness(run)] == ["judge, better than without", "judge"]
    assert len(judge.asked) == 8


def test_a_refitted_judge_is_asked_again(run, tmp_path):
    judge, trial = FirstWord(), load_label_table([run])
    judge_run_passages(run, trial.rows, str(write_gate(tmp_path / "judge")), judge)
    judge_run_passages(run, trial.rows, str(write_gate(tmp_path / "judge", threshold=0.4)), judge)
    assert len(judge.asked) == 8
    assert len(read_usefulness(run)) == 1


def test_a_run_without_texts_is_rejected(tmp_path):
    bare = [replace(row, passages=()) for row in rows()]
    run = write_rows(tmp_path / "run", bare)
    with pytest.raises(BadSetting, match=r"4 rows of .* have no texts"):
        judge_run_passages(run, bare, str(write_gate(tmp_path / "judge")), FirstWord())


def test_invalid_stored_verdicts_are_rejected(run):
    (run / "useful.jsonl").write_text(json.dumps({"judge": "j", "fingerprint": "f", "useful": {"a": 0.7}}) + "\n")
    with pytest.raises(ArtifactError, match="not true or false"):
        read_usefulness(run)


def test_a_gate_that_cannot_judge_passages_is_rejected(run, tmp_path):
    with pytest.raises(BadSetting, match="cannot tell whether passages help"):
        evaluate("logprob:first", run, second_look=write_gate(tmp_path / "fusion"), resamples=0)
