"""KBM with 30 samples, CBDR with a larger base, and an LLM as grader: steps, targets and records."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import graders, kbm_samples, paper_record
from benchmarks.cbdr_alignment import make_targets
from benchmarks.tables import cbdr_larger_base, kbm_labels, kbm_passages
from benchmarks.tables.cbdr_probe import skip_share
from knowgate.types import Passage, Question


def write_lines(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def plan(tmp_path):
    for part in ("with", "alone", "test"):
        split = "test" if part == "test" else "train"
        write_lines(tmp_path / "data" / f"nq_ctx_{part}" / f"{split}.jsonl.gz", [{}])
    return kbm_samples.SamplesPlan("fake", tmp_path, tmp_path)


def test_every_train_question_gets_samples_and_the_probe_learns_from_all(plan):
    steps = {step.name: " ".join(step.words) for step in plan.steps()}
    assert "--samples 30 --open-samples 30" in steps["label-with-nq_ctx"]
    assert "--samples 30 --closed-book" in steps["label-alone-nq_ctx"]
    assert "--samples 0 --closed-book" in steps["label-test-nq_ctx"]
    assert all(plan.path(f"nq_ctx-{part}") in steps["probe-fit-nq_ctx"] for part in ("with", "alone"))


def test_prompts_get_the_labels_of_their_own_side(plan, monkeypatch):
    keys = [("a", 0, False), ("a", 3, False), ("b", 0, False), ("c", 0, True)]
    prompts = [{"set": "nq_ctx", "id": key, "passages": passages, "test": test} for key, passages, test in keys]
    write_lines(plan.work / "rows" / "kbm30_rows.jsonl.gz", prompts)
    file = plan.work / "rows" / "kbm30_rows.npz"
    np.savez(file, targets=np.full((4, 3), np.nan, np.float32), folds=np.array([0, 0, 0, -1]))
    labels = {("nq_ctx", "a", False): (0.6, 0.1), ("nq_ctx", "a", True): (0.9, 0.9), ("nq_ctx", "c", False): (1, 1)}
    monkeypatch.setattr(kbm_samples, "read_labels", lambda plan: labels)
    kbm_samples.add_targets(plan)
    targets = np.load(file)["targets"]
    assert targets[0].tolist() == [0, 1, 0]
    assert targets[1].tolist() == [1, 1, 1]
    assert np.isnan(targets[2:]).all()  # not labeled; a test question
    facts = json.loads((plan.work / "rows" / "kbm30_rows.json").read_text())
    assert (facts["train"], facts["train_with_passages"], facts["certainty_tau"]) == (2, 1, 0.8)


def test_a_reranker_learns_only_from_questions_with_passages_of_both_kinds():
    contexts = tuple(Passage(key, text) for key, text in zip("abc", ("Rome", "Oslo", "Bonn"), strict=True))
    question = Question("Which?", answers=("Rome",), contexts=contexts)
    benefit = [("a", 1.0, True), ("b", 0.0, False), ("c", 0.0, False)]
    likelihood = [("a", 2.0, None), ("b", 1.5, None), ("c", -3.0, None)]
    targets = make_targets(question, benefit, likelihood)
    assert targets["a"] == [1, 1, 1, 1, 1]
    np.testing.assert_array_equal(targets["b"], [0, 0, 1, np.nan, 1])  # too close to the best passage
    assert targets["c"] == [0, 0, 0, 0, 0]
    all_wrong = [(key, 0.0, False) for key in "abc"]
    np.testing.assert_array_equal(make_targets(question, all_wrong, likelihood)["c"], [0, np.nan, 0, np.nan, 0])


def test_the_ranking_with_the_best_dev_p_at_1_is_chosen(tmp_path, monkeypatch):
    def logits(first):
        return {"good": [first, 0.0], "bad": [0.5, 0.0]}

    names = {"aligned_seed0": 0.0, "aligned_seed1": 1.0, "aligned_seed2": 1.0, "margin_seed0": 1.0}
    row = {"set": "nq", "id": "q", "test": False, "logits": {name: logits(value) for name, value in names.items()}}
    file = tmp_path / "larger_base.jsonl.gz"
    paper_record.write_record(file, [row])
    monkeypatch.setattr(cbdr_larger_base, "LARGER_BASE", file)
    effects = {("pref-benefit-nq-train", "q"): [("bad", 0.0, False), ("good", 1.0, True)]}
    monkeypatch.setattr(cbdr_larger_base, "load_effects", lambda: effects)
    chosen, values = cbdr_larger_base.choose_ranking("benefit")
    assert values == {"seed 0": 0, "ensemble": 1, "margin": 1, "ensemble and margin": 1}
    assert chosen == "ensemble"


def test_the_larger_base_keeps_the_heads_that_a_training_taught(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_record, "LARGER_BASE", tmp_path / "out.jsonl.gz")
    monkeypatch.setattr(paper_record, "TRAININGS", tmp_path / "trainings.json")
    write_lines(tmp_path / "rerank_rows.jsonl.gz", [{"set": "nq", "id": "q", "passage": "p", "test": True}])
    for name in ("aligned_seed0", "relevance", "margin_seed0"):
        values = np.arange(5, dtype=np.float32)[None, None]
        np.savez(tmp_path / f"rerank_{name}-1.npz", index=np.array([0]), logits=values, facts=np.array("{}"))
    paper_record.write_larger_base(tmp_path, tmp_path)
    [record] = paper_record.read_record(tmp_path / "out.jsonl.gz")
    heads = {"aligned_seed0": [1, 2], "relevance": [0], "margin_seed0": [3, 4]}
    assert record["logits"] == {name: {"p": values} for name, values in heads.items()}


def test_an_llm_grades_the_answers_that_people_graded(tmp_path, monkeypatch):
    answers = graders.GradedAnswers("GPT-4", [Question("Q?", answers=("Rome",))] * 3, ["Rome", "Oslo", "?"], [True] * 3)
    monkeypatch.setattr(graders, "read_answers_graded_by_people", lambda bench: [answers])
    verdicts = {"Rome": "yes", "Oslo": "no", "?": "hm"}

    def generate(prompts, max_tokens):
        return [[SimpleNamespace(text=next(v for k, v in verdicts.items() if k in p.text))] for p in prompts]

    monkeypatch.setattr("knowgate.models.load_model", lambda spec: SimpleNamespace(name="fake", generate=generate))
    monkeypatch.setattr("knowgate.labels.grading.JudgeGrader._make_prompt", lambda self, answer, question: answer)
    graders.write_llm_verdicts(tmp_path, "fake", tmp_path / "verdicts.jsonl.gz")
    read = graders.read_llm_verdicts(tmp_path / "verdicts.jsonl.gz")
    assert read == {"GPT-4": {key: [True, False, False] for key in ("LLM, implies", "LLM, contains")}}


def test_a_quantile_of_the_other_half_skips_the_most_confident():
    skipped = skip_share(np.linspace(0, 1, 100))
    assert skipped.sum() == pytest.approx(17, abs=2)
    assert skipped[-15:].all()


def test_the_record_of_samples_has_labels_and_raw_scores_of_probes(tmp_path, monkeypatch):
    for name in ("KBM_30_LABELS", "PROBE_CONFIDENCE", "SAMPLES_SECONDS"):
        monkeypatch.setattr(paper_record, name, tmp_path / name)
    out = tmp_path / "out"
    label = {"set": "nq_ctx", "id": "a", "passages": False, "mastery": 0.5, "certainty": 0.25}
    write_lines(out / "kbm30_labels.jsonl.gz", [label])
    runs = {f"nq_ctx-{part}": {"totals": {"rows": rows}} for part, rows in (("with", 2), ("alone", 6), ("test", 9))}
    (out / "runs.json").write_text(json.dumps(runs))
    (out / "nq_ctx.needs.jsonl").write_text(
        json.dumps({"gate": "probe-nq_ctx", "needs": {"b": 0.9}, "raw": {"b": 0.4}})
    )
    (out / "seconds.json").write_text('{"label-with-nq_ctx": 1.5}')
    paper_record.write_samples(out)
    assert paper_record.read_record(tmp_path / "KBM_30_LABELS") == [label]
    assert paper_record.read_record(tmp_path / "PROBE_CONFIDENCE") == [{"set": "nq_ctx", "train": 8, "raw": {"b": 0.4}}]
    assert json.loads((tmp_path / "SAMPLES_SECONDS").read_text()) == {"label-with-nq_ctx": 1.5}


def test_labels_change_only_where_ten_and_thirty_samples_differ(monkeypatch):
    rows = [
        SimpleNamespace(id=key, closed=SimpleNamespace(mastery=mastery, certainty=0.7))
        for key, mastery in (("a", 0.5), ("b", 0.9), ("c", 0.1), ("d", 0.4))
    ]
    settings = {"samples": 10}
    run = SimpleNamespace(manifest=lambda: {"settings": settings}, rows=lambda: rows)
    monkeypatch.setattr("knowgate.data.runs.folder.RunFolder", lambda folder: run)
    labels = {"a": (0.4, 0.7), "b": (0.7, 0.7), "c": (0.1, 0.5), "d": (0.3, 0.5)}
    monkeypatch.setattr(kbm_labels, "read_labels", lambda names: labels)
    assert kbm_labels.measure_changes("nq_ctx") == ("25.0 %", "25.0 %", "50.0 %")
    settings["samples"] = 30
    assert kbm_labels.measure_changes("nq_ctx") == ("–", "–", "–")


def test_sections_without_a_record_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(kbm_labels, "KBM_30_LABELS", tmp_path / "labels.jsonl.gz")
    monkeypatch.setattr(cbdr_larger_base, "LARGER_BASE", tmp_path / "larger_base.jsonl.gz")
    monkeypatch.setattr(kbm_passages, "KBM_30", tmp_path / "kbm30.jsonl.gz")
    assert [*kbm_labels.label_tables(), *cbdr_larger_base.larger_base_tables()] == []
    assert not [judge for judge in kbm_passages.list_recorded_judges() if judge.startswith("kbm30")]
