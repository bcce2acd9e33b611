"""One IK judge per data set: what each learns from, what each scores, and what is recorded."""

import json

import numpy as np
import pytest

from benchmarks import ik_transfer
from benchmarks.ik_transfer import GradedQuestion, drop_tested, encode, list_records, plan_jobs
from benchmarks.paper_record import write_record
from benchmarks.tables import ik_transfer as tables
from knowgate.data.splits import fingerprint_text_loosely
from knowgate.types import Question

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

INDEX = {
    "train": {"nq": {"rows": 4, "known": 1}, "squad": {"rows": 9, "known": 2}},
    "test": {"nq": [["n0", 1], ["n1", 0]], "squad": [["s0", 0]], "new": [["x0", 1]]},
}


def grade(text, is_right=True, question_id="q"):
    return GradedQuestion(Question(text, question_id), "x a", is_right)


def test_a_judge_learns_from_its_own_rows_and_scores_all_test_sets():
    jobs = {job.name: job for job in plan_jobs(INDEX)}
    assert list(jobs) == ["pooled", "untrained", "squad", "nq"]
    assert jobs["nq"].sets == ("nq-train",)
    assert set(jobs["pooled"].sets) == {"nq-train", "squad-train"}
    assert {job.also for job in jobs.values()} == {("nq-test", "squad-test", "new-test")}
    assert {job.epochs for name, job in jobs.items() if name != "untrained"} == {2}


def test_train_rows_whose_question_is_tested_are_left_out():
    tested = {fingerprint_text_loosely("Who wrote Faust?")}
    rows = drop_tested([grade("who wrote faust"), grade("Who wrote Emma?")], tested)
    assert [row.question.text for row in rows] == ["Who wrote Emma?"]


def test_the_record_has_ids_and_numbers_in_the_order_of_the_test_rows():
    predictions = {"pooled": np.array([1, 2, 3, 4.0]), "nq": np.array([-1, -2, -3, -4.00049])}
    head, *rows = list_records(INDEX, predictions)
    assert head == {"judges": ["nq", "pooled"], "train": {"nq": {"rows": 4, "known": 1}}}
    assert rows[2] == {"set": "squad", "id": "s0", "right": 0, "logits": [-3.0, 3.0]}
    assert rows[3]["logits"] == [-4.0, 4.0]
    with pytest.raises(ValueError, match="zip"):
        list(list_records(INDEX, {"pooled": np.zeros(3)}))


# Old releases of peft leave the attribute there when an adapter is removed.
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_the_untrained_judge_scores_as_the_llm_does(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.policy_training import do_job
    from tests.support.tiny_models import save_word_llama

    folder = save_word_llama(tmp_path / "llama")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tests = encode(tokenizer, [grade("a b c?"), grade("no idea")], is_test=True)
    encode(tokenizer, [grade("x?"), grade("d e", False)], is_test=False).save(tmp_path / "nq-train.npz")
    tests.save(tmp_path / "nq-test.npz")
    index = {"train": {"nq": {"rows": 2}}, "test": {"nq": [["0", 1], ["1", 1]]}}
    options = type("Options", (), {"out": tmp_path, "rows": tmp_path, "device": "cpu", "workers": 1})
    for job in plan_jobs(index):
        do_job(job, model, tokenizer, options, print)
    ik_transfer.collect_predictions(tmp_path, index)
    predictions = np.load(tmp_path / "predictions.npz")
    yes, no = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    expected = []
    for ids in tests.ids:
        last = model(torch.tensor([ids])).logits[0, -1]
        expected.append(float(last[yes] - last[no]))
    assert predictions["untrained"].tolist() == pytest.approx(expected, abs=1e-4)
    assert predictions["nq"].tolist() != pytest.approx(expected, abs=1e-4)
    assert set(json.loads(str(predictions["facts"]))) == {"pooled", "untrained", "nq"}


@pytest.fixture
def record(tmp_path):
    """Two data sets of open questions and one of multiple choice; the judge of NQ fails on the latter."""
    rows = [{"judges": ["nq_ctx", "mmlu", "pooled"], "train": {"nq_ctx": {}, "mmlu": {}}}]
    for number in range(80):
        right = number % 2
        for name, logits in (
            ("nq_ctx", [right, 0.5, right]),
            ("mmlu", [-right, 2 * right - 1, right]),
            ("freshqa", [right if number >= 20 else 0.5, 0.5, 1]),
        ):
            rows.append({"set": name, "id": str(number), "right": right, "logits": [*map(float, logits)]})
    write_record(tmp_path / "record.jsonl.gz", rows)
    return tmp_path / "record.jsonl.gz"


def cells_of(text, first):
    return next(line for line in text.splitlines() if line.startswith(f"| {first} |"))[2:-2].split(" | ")


def test_the_matrix_marks_the_judge_of_the_own_train_rows(record):
    text = tables.render_matrix(*tables.read_test_sets(record))
    assert cells_of(text, "nq_ctx")[1:] == ["50 %", "**1.000**", "0.500", "1.000"]
    assert cells_of(text, "mmlu")[1:] == ["50 %", "0.000", "**1.000**", "1.000"]
    # A quarter of the known and of the unknown have the same score: 1 - 0.25 * 0.25 / 2.
    assert cells_of(text, "freshqa")[1:] == ["50 %", "0.969", "0.500", "0.500"]


def test_means_tell_judges_of_the_same_kind_from_those_of_the_other(record):
    judges, tests = tables.read_test_sets(record)
    assert tables.mean_by_kind(judges, tests, "open") == {"own": 1.0, "other kind": 0.5, "pooled": 1.0}
    assert tables.mean_by_kind(judges, tests, "choice") == {"own": 1.0, "other kind": 0.0, "pooled": 1.0}


def test_intervals_and_verdicts_stand_beside_the_commoner_verdict(record):
    text = tables.render_intervals(tables.read_test_sets(record)[1])
    assert cells_of(text, "mmlu")[1:] == [
        "1.000 [1.000, 1.000]", "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "+0.000 [+0.000, +0.000]",
        "100.0 / 50.0 / 100.0", "50.0",
    ]  # fmt: skip
    assert cells_of(text, "freshqa")[1] == "–"  # no judge of its own


def test_there_is_no_section_without_a_record(tmp_path):
    assert list(tables.ik_transfer_tables(tmp_path / "missing.jsonl.gz")) == []
