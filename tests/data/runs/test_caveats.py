"""What must be known of the questions behind figures: synthetic ones, and those graded by agreement."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from knowgate.data.runs.columns import describe_synthetic, list_caveats
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.table import load_label_table
from knowgate.gates.calibration.evidence import summarize_threshold
from knowgate.labels.labeling import label
from knowgate.models.fake import FakeModel
from knowgate.types import Passage, Question


def run_of(folder: Path, name: str, *, synthetic: bool) -> Path:
    passage = Passage("p", "some text")
    meta = {"synthetic": True} if synthetic else {}
    questions = [
        Question(f"{name} {i}?", id=f"{name}{i}", answers=("a",), contexts=(passage,), meta=meta) for i in range(3)
    ]
    label(questions, out=folder / name, model=FakeModel(), samples=0)
    return folder / name


def test_real_questions_with_gold_answers_have_no_caveats():
    assert list_caveats([LabelRow("1", "q", "en", grader="contains")]) == []


def test_a_run_records_its_number_of_synthetic_questions(tmp_path: Path):
    written = json.loads((run_of(tmp_path, "s", synthetic=True) / "run.json").read_text(encoding="utf-8"))
    assert written["settings"]["synthetic"] == 3
    asked = json.loads((run_of(tmp_path, "r", synthetic=False) / "run.json").read_text(encoding="utf-8"))
    assert "synthetic" not in asked["settings"]


def test_mixing_synthetic_and_real_runs_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    runs = [run_of(tmp_path, "s", synthetic=True), run_of(tmp_path, "r", synthetic=False)]
    with caplog.at_level(logging.WARNING):
        load_label_table(runs)
    assert "wrote 3 of 6 questions from the documents" in caplog.text


def test_runs_of_one_kind_log_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        load_label_table([run_of(tmp_path, "r", synthetic=False), run_of(tmp_path, "q", synthetic=False)])
    assert caplog.text == ""


def test_grading_by_agreement_is_a_caveat():
    said = list_caveats([LabelRow("1", "q", "en", grader="agreement"), LabelRow("2", "q", "en", grader="contains")])
    assert said[0].startswith("No gold answers: for 1 of 2 questions")


@pytest.mark.parametrize(("count", "words"), [(0, ""), (4, "Synthetic: an LLM wrote 4 of 4 questions")])
def test_synthetic_questions_are_described(count: int, words: str):
    assert describe_synthetic(count, 4).startswith(words)
    assert bool(describe_synthetic(count, 4)) == bool(words)


def test_a_threshold_records_that_it_was_chosen_on_synthetic_questions():
    evidence = {"n": 50, "chosen_on": {"n": 50}, "synthetic": 50}
    assert "an LLM wrote 50 of 50 questions" in summarize_threshold(0.5, "accuracy", evidence)
    assert "LLM wrote" not in summarize_threshold(0.5, "accuracy", {**evidence, "synthetic": 0})
