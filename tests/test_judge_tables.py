"""The tables of an 8B LLM behind an API, from predictions that are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.judge_answers import ANSWERS, HOME, read_answers, read_judge
from benchmarks.judge_cascade import add_predictions_to_run, best_rule, cascade_points, choose_judge, headline
from benchmarks.judge_summary import summary
from benchmarks.tables.judge import draw_judge, judge_tables
from benchmarks.tables.judge_speed import speed_table
from knowgate.errors import BadInput

ROOT = Path(__file__).parents[1]
BOTH = ("known", "closed", "open")


def write_predictions(home: Path, name: str, noise: float = 1.0, columns=BOTH, rows: int | None = None) -> None:
    """Scores that know the truth, more or less; rows: only the first so many."""
    (home / "judge").mkdir(parents=True, exist_ok=True)
    lines = []
    for split, source in (("dev", "train"), ("test", "test")):
        answers, rng = read_answers(HOME, source), np.random.default_rng([len(split), 7])
        truth = {"known": answers.closed, "closed": answers.closed, "found": answers.open, "open": answers.open}
        scores = {
            column: 1 / (1 + np.exp(-(2.0 * truth[column] - 1.2 + noise * rng.normal(size=len(answers)))))
            for column in columns
        }
        for place, key in enumerate(answers.ids):
            row = {"id": key, "split": split, **{c: round(float(scores[c][place]), 6) for c in columns}}
            lines.append(json.dumps(row) + "\n")
    (home / "judge" / f"{name}.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / ANSWERS).write_bytes((HOME / ANSWERS).read_bytes())
    write_predictions(folder, "good")
    write_predictions(folder, "bad", noise=4.0)
    write_predictions(folder, "judge", columns=("known",))
    return folder


def test_the_answers_on_record_are_those_of_the_data_set():
    answers = read_answers(HOME, "test")
    assert len(answers) == 3000
    right = [float(column.mean()) for column in (answers.closed, answers.open, answers.closed | answers.open)]
    assert [round(share, 3) for share in right] == [0.328, 0.384, 0.472]


def test_no_text_is_on_record():
    from knowgate.core.files import read_jsonl

    kinds = {"id": str, "split": str, "set": str}
    for _, row in read_jsonl(HOME / ANSWERS):
        assert all(isinstance(value, kinds.get(name, bool)) for name, value in row.items())


def test_the_headline_has_every_number_and_rates_come_out_as_wanted(home):
    found = headline(read_judge(home, "good"))
    assert (found["never"], found["always"], found["oracle"]) == (0.3283, 0.384, 0.472)
    assert found["judge_auroc"] > 0.85
    assert found["arbiter_accuracy"] > found["always"] > found["never"]
    assert list(found["cascade"]) == ["0.9", "0.8", "0.7", "0.6", "0.5"]
    assert all(abs(rate - float(wanted)) <= 0.03 for wanted, rate in found["retrieval"].items())


def test_the_predictions_are_chosen_on_dev_rows_unless_named(home):
    judges = {name: read_judge(home, name) for name in ("bad", "good", "judge")}
    assert choose_judge(judges).name == "good"
    assert choose_judge(judges, "bad").name == "bad"
    assert choose_judge({"judge": judges["judge"]}) is None  # it cannot choose between answers


def test_test_rows_have_no_say_in_the_threshold(home, tmp_path):
    first = cascade_points(read_judge(home, "good"), "judge")
    other = tmp_path / "judge" / "good.jsonl"
    other.parent.mkdir()
    (tmp_path / ANSWERS).write_bytes((home / ANSWERS).read_bytes())
    rows = [json.loads(line) for line in (home / "judge" / "good.jsonl").read_text().splitlines()]
    turned = [{**row, "known": 1 - row["known"]} if row["split"] == "test" else row for row in rows]
    other.write_text("".join(json.dumps(row) + "\n" for row in turned), encoding="utf-8")
    again = cascade_points(read_judge(tmp_path, "good"), "judge")
    assert [one.threshold for one in again] == [one.threshold for one in first]


def test_what_documents_would_add_is_a_rule_where_it_is_predicted(home):
    write_predictions(home, "found", columns=("known", "found", "closed", "open"))
    assert best_rule(read_judge(home, "found"), "none", 0.6) == "gain"
    assert best_rule(read_judge(home, "good"), "none", 0.6) == "known"


@pytest.mark.parametrize(
    ("rows", "message"), [(2970, "0 of 3000 test rows"), (5000, "2030 of 3000 test rows"), (0, "no dev rows")]
)
def test_predictions_that_lack_rows_are_refused(home, tmp_path, rows, message):
    (tmp_path / ANSWERS).write_bytes((home / ANSWERS).read_bytes())
    write_predictions(tmp_path, "short", rows=rows)
    with pytest.raises(BadInput, match=message):
        read_judge(tmp_path, "short")


@pytest.mark.slow
def test_the_tables_say_it_all(home, monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.tables.judge.GOALS", ((0.05, "harm"), (0.05, "net")))
    text = "\n".join(judge_tables(home, "good"))
    for words in ("cascade: judge, then arbiter", "text gate: fusion", "musique (500)", "McNemar p", "With a guarantee",
                  "several", "Every judge"):  # fmt: skip
        assert words in text
    draw_judge(tmp_path, home)
    assert (tmp_path / "judge.svg").read_text(encoding="utf-8").startswith("<svg")


def test_without_predictions_there_is_nothing_to_tell(tmp_path):
    (tmp_path / ANSWERS).write_bytes((HOME / ANSWERS).read_bytes())
    assert list(judge_tables(tmp_path)) == []


@pytest.mark.slow
def test_the_script_prints_one_json_object(home):
    command = [sys.executable, "benchmarks/judge.py", "--home", str(home), "--predictions", "good", "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["predictions"] == "good"


def test_predictions_beside_a_label_run_are_evaluated_like_any_gate_and_arbiter(home, tmp_path):
    from knowgate.evaluation.gate_evaluation import evaluate

    run = tmp_path / "run"
    run.mkdir()
    packed = HOME / "gate_llama3_8b-test"
    for name in ("labels.jsonl.gz", "run.json"):
        (run / name).write_bytes((packed / name).read_bytes())
    judge = read_judge(home, "good")
    add_predictions_to_run(judge, run)
    found = evaluate("judge", run, arbiter="judge", resamples=20).cascade
    assert found.results[1].rate == pytest.approx(0.6, abs=0.03)
    assert found.from_memory == pytest.approx(float(judge.test.arbiter_prefers_closed_book.mean()))


def test_what_the_demo_shows_is_what_the_predictions_on_record_come_to():
    from knowgate.cli.demo.comparison import demo_folder

    shipped = json.loads((demo_folder() / "judge.json").read_text(encoding="utf-8"))
    assert shipped == summary(read_judge(HOME, "cascade")), "make results writes it anew"


def test_the_cost_of_judges_is_shown_where_it_was_recorded(home, tmp_path):
    assert list(speed_table(home)) == []
    cost = {"ms": 20.0, "core_ms": 30.4, "ratio": 2.04, "core_ratio": 1.5, "tokens": None}
    told = {"judges": {"smollm": cost}, "cores": 2, "questions": 20, "reference": "smollm", "load": [3.5, 1.0, 1.0]}
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "speed.json").write_text(json.dumps(told), encoding="utf-8")
    text = "\n".join(speed_table(tmp_path))
    assert "| SmolLM2-135M, torch fp32 | - | 30 | 20 | 1.5 | 2 |" in text
    assert "load was 3.5: where that is above 2, other work" in text
