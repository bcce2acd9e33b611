"""One IK judge per data set: what each learns from, what each scores, and what is recorded."""

import json

import numpy as np
import pytest

from benchmarks import ik_transfer
from benchmarks.ik_transfer import GradedQuestion, drop_tested, encode, list_records, plan_jobs
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
    options = type("Options", (), {"out": tmp_path, "rows": tmp_path, "device": "cpu"})
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
