"""The benchmark of DH-ICL with a growing log: what each pass reads, resuming, the choice of a variant, and the record."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import dhicl_log
from benchmarks.dhicl_log import ArrayLog, Inputs, Job
from benchmarks.paper_record import read_record
from benchmarks.tables import dhicl_log as tables
from knowgate.data.history.entries import KnowledgeLabel
from knowgate.models.fake import FakeModel
from knowgate.stats.metrics import auroc

LOG, TESTS = 60, 12


@pytest.fixture
def inputs(monkeypatch) -> Inputs:
    """A log of 60 questions, every third known, and 12 test questions; similar numbers have similar vectors."""
    monkeypatch.setattr(dhicl_log, "MAIN_SIZE", LOG)
    monkeypatch.setattr(dhicl_log, "CURVE_SIZES", (30,))
    monkeypatch.setattr(dhicl_log, "LEFT_OUT", 20)
    monkeypatch.setattr(dhicl_log, "CURVE_LEFT_OUT", 10)
    rows = [
        {
            "id": f"q{i}",
            "question": f"Question number {i}?",
            "draft": f"answer {i}",
            "known": int(i % 3 == 0),
            "test": False,
        }
        for i in range(LOG)
    ]
    rows += [
        {
            "id": f"t{i}",
            "question": f"Test number {i}?",
            "draft": "no",
            "known": int(i % 2 == 0),
            "test": True,
            "kbsat": i < 8,
        }
        for i in range(TESTS)
    ]
    angles = np.linspace(0, 1.5, LOG).tolist() + np.linspace(0.01, 1.49, TESTS).tolist()
    return Inputs(rows, np.array([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=np.float32))


@pytest.fixture
def model(inputs) -> FakeModel:
    return FakeModel({row["question"]: {"known": bool(row["known"])} for row in inputs.rows})


def test_a_question_is_not_its_own_example_and_the_log_ends_at_its_size(inputs):
    (neighbors,) = ArrayLog(inputs, 30).search(["Question number 10?"], 4, dhicl_log.SCOPE)
    assert {item.question for item in neighbors} == {f"Question number {i}?" for i in (8, 9, 11, 12)}
    (last,) = ArrayLog(inputs, 30).search(["Question number 50?"], 2, dhicl_log.SCOPE)
    assert [item.question for item in last] == ["Question number 29?", "Question number 28?"]


def test_excluded_labels_are_no_examples(inputs):
    (neighbors,) = ArrayLog(inputs, LOG).search(["Test number 3?"], 5, dhicl_log.SCOPE, (KnowledgeLabel.UNKNOWN,))
    assert len(neighbors) == 5
    assert {item.label for item in neighbors} == {"known"}


def test_a_pass_scores_every_question_of_its_part(inputs, model):
    nearest = Job(LOG, 6, False, "test").decide(inputs, model)
    balanced = Job(LOG, 6, True, "test").decide(inputs, model)
    assert nearest["odds"].shape == (TESTS, 3)
    assert set(nearest["known"]) == {2}  # every third question is known
    assert set(balanced["known"]) == {3}
    assert ((nearest["odds"][:, 0] < 0) == inputs.known[LOG:]).all()  # the fake LLM knows what it knows
    assert list(Job(30, 6, False, "log").select(inputs)) == list(range(10))
    assert list(Job(LOG, 6, False, "more").select(inputs)) == list(range(20, 40))


def test_drafts_follow_the_questions_and_the_examples(inputs, model, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        model, "label_logits", lambda batch, labels: prompts.extend(batch) or [np.zeros((7, 2))] * len(batch)
    )
    Job(LOG, 6, False, "test", with_drafts=True).decide(inputs, model)
    assert all("\nMy answer: answer " in part for part in prompts[0].parts[:-1])
    assert prompts[0].parts[-1].endswith("Question: Test number 0?\nMy answer: no\nAnswer:")


def test_the_direct_question_needs_no_log(inputs, model):
    odds = Job(0, 0, False, "test").decide(inputs, model)["odds"]
    assert odds.shape == (TESTS, 3)
    assert (odds[:, 0] == odds[:, 2]).all()


def test_a_second_call_continues_and_the_record_holds_no_texts(inputs, model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    dhicl_log.run_jobs(inputs, model, out, seconds=-1)
    assert not list(out.glob("*.npz"))
    assert "stopped before 60-k10-log" in capsys.readouterr().out
    dhicl_log.run_jobs(inputs, model, out, seconds=60)
    files = {file.stem for file in out.glob("*.npz")}
    assert {"60-k10-log", "60-k20-test", "60-k20-balanced-test", "0-k0-test", "60-k20-more", "30-k20-test"} <= files
    assert not any("partial" in name for name in files)
    capsys.readouterr()
    dhicl_log.run_jobs(inputs, model, out, seconds=60)
    assert "questions in" not in capsys.readouterr().out
    monkeypatch.setattr(dhicl_log, "RECORD", tmp_path / "record.jsonl.gz")
    dhicl_log.record(inputs, out)
    facts, *rows = read_record(tmp_path / "record.jsonl.gz")
    assert facts["tuned"]["k"] in dhicl_log.COUNTS
    assert set(facts["seconds"]) == files
    assert "question" not in rows[0]
    by_id = {row["id"]: row["passes"] for row in rows}
    assert len(by_id["t0"]["60-k20"]) == 5  # three log-odds, the number of known examples, their vote
    assert len(by_id["t0"]["0-k0"]) == 3
    assert "30-k20" in by_id["q5"]
    assert "30-k20" not in by_id["q15"]  # only the first 10 of a smaller log are left out
    assert {"60-k20-draft", "60-k20-balanced-draft"} <= set(by_id["t0"])
    assert "60-k20" in by_id["q25"]  # 20 more at the main size


def test_the_variant_with_the_best_order_of_logged_questions_is_chosen(inputs, tmp_path):
    rng = np.random.default_rng(0)
    for k in dhicl_log.COUNTS:
        for balanced in (False, True):
            job = Job(LOG, k, balanced, "log")
            odds = rng.normal(size=(20, 3))
            if (k, balanced) == (30, True):
                odds[:, 1] = np.where(inputs.known[:20], -1.0, 1.0)
            np.savez(tmp_path / f"{job.name}.npz", odds=odds)
    assert dhicl_log.choose_variant(inputs, tmp_path) == (30, True, 1)


# --- tables -----------------------------------------------------------------------------------------


def make_record(**passes):
    """A record of 40 logged questions and two test questions, half of them known, with the given values of passes."""
    rows = [
        {
            "id": f"q{i}",
            "known": i % 2,
            "test": i >= 40,
            "kbsat": i >= 40,
            "passes": {name: values(i) for name, values in passes.items()},
        }
        for i in range(42)
    ]
    return tables.LogRecord({}, rows)


def test_a_cut_is_learned_from_logged_questions_only():
    record = make_record(**{"5000-k20": lambda i: [0.0, 1.0 + i / 100 if i % 2 else 3.0 + i / 100, 0.0, 2, 0.5]})
    score = record.read(5000, "k20", 1)
    cut = record.learn_cut(score)
    assert ((score.logged > cut) == ~record.known).all()


def test_the_cut_of_an_operating_point_keeps_the_loss(monkeypatch):
    record = make_record(**{"5000-k20": lambda i: [float(i), float(i), float(i), 2, 0.5]})
    changes = np.zeros(40)
    changes[10], changes[20], changes[5] = -1, -1, np.nan  # of 39 questions, one lost answer is 2.6 points
    monkeypatch.setattr(type(record), "log_changes", changes)
    monkeypatch.setattr(tables, "LOSS", 0.03)
    assert record.learn_loss_cut(record.read(5000, "k20", 0)) == 19.0
    monkeypatch.setattr(tables, "LOSS", 0.005)
    assert record.learn_loss_cut(record.read(5000, "k20", 0)) == 9.0


def test_calibrated_scores_of_logged_questions_are_out_of_fold():
    noise = np.random.default_rng(0).normal(size=42)
    record = make_record(
        **{
            "5000-k20": lambda i: [0.0, 1.0 - 2 * (i % 2) + 0.1 * noise[i], 0.0, 2, 0.5],
            "5000-k20-balanced": lambda i: [0.0, float(noise[i]), 0.0, 2, 0.5],
        }
    )
    parts = [record.read(5000, name, 1) for name in ("k20", "k20-balanced")]
    score = record.calibrate(parts)
    assert ((score.logged > 0) == ~record.known).all()
    assert (score.test > 0).tolist() == [True, False]
    alone = record.calibrate(parts[1:])  # noise: out-of-fold predictions cannot learn it by heart
    assert (auroc(~record.known, alone.logged) or 0.5) < 0.75


def test_the_better_pass_with_drafts_is_chosen_on_logged_questions():
    good = lambda i: [0.0, 1.0 - 2 * (i % 2), 0.0, 2, 0.5]  # noqa: E731
    flat = lambda i: [0.0, 0.0, 0.0, 2, 0.5]  # noqa: E731
    record = make_record(**{"5000-k20-draft": flat, "5000-k20-balanced-draft": good})
    assert record.choose_draft() == ("k20-balanced-draft", 1)


def test_a_missing_record_renders_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RECORD", tmp_path / "none.jsonl.gz")
    assert not list(tables.log_tables())
    assert set(tables.summarize_log().values()) == {"–"}


@pytest.mark.records
def test_the_tuned_variant_of_the_record_is_that_of_the_paper():
    assert tables.load_log_record().facts["tuned"] == {"k": 20, "balanced": False, "sign": "paper"}  # the tables say so
