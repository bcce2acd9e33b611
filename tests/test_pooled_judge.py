"""The pooled judge of the policy benchmark: its rows, its records, and when it replaces the adapters of one LLM."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import policy_evaluation, policy_record
from benchmarks.policy_predictions import POOLED
from benchmarks.policy_rows import TEST_FOLD, UNUSED_FOLD, encode_recorded, write_recorded
from benchmarks.policy_sets import RECORDED_SETS, RecordedRow

pytestmark = pytest.mark.records


class WordTokenizer:
    """One token per word."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [len(word) for word in text.split()]


def make_row(question: str, split: str) -> RecordedRow:
    return RecordedRow("1", split, question, "from memory", "from documents", True, False)


def write_bench(folder, name: str, trains: list[str], tests: list[str]) -> None:
    recorded = RECORDED_SETS[name]
    (folder / recorded.data).mkdir()
    for split in recorded.splits:
        with gzip.open(folder / recorded.data / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for question in trains if split == "train" else tests:
                grades = {recorded.grades or "unused": {"nor": True, "oner": False}}
                meta = {"pred_no_retrieval": "a", "pred_one_retrieval": "b", **grades}
                file.write(json.dumps({"id": question, "question": question, "answers": ["a"], "meta": meta}) + "\n")


def test_a_question_is_in_one_fold_whichever_llm_answered_it(tmp_path):
    trains = [f"question {number}" for number in range(40)]
    for name in RECORDED_SETS:
        write_bench(tmp_path, name, trains, ["a test question"])
    write_recorded(tmp_path, WordTokenizer(), tmp_path, only_pooled=True)
    folds = [
        np.load(tmp_path / f"{name}.named.npz")["folds"].tolist() for name in policy_evaluation.list_trained_sets()
    ]
    assert all(each == folds[0] for each in folds)
    assert set(folds[0]) == {TEST_FOLD, 0, 1, 2, 3}
    assert not (tmp_path / "gpt4_nq.npz").exists()


def test_no_adapter_learns_from_a_test_question_of_another_llm(tmp_path):
    for name in RECORDED_SETS:
        write_bench(
            tmp_path, name, ["Who wrote Emma?", f"only {name}"], ["who wrote emma"] * (name == "gpt4_nq") or ["x"]
        )
    write_recorded(tmp_path, WordTokenizer(), tmp_path, only_pooled=False)
    own, named = (np.load(tmp_path / f"llama3_8b{suffix}.npz")["folds"] for suffix in ("", ".named"))
    assert named[0] == UNUSED_FOLD
    assert named[1] == own[1] >= 0
    assert own[0] >= 0  # the adapters of one LLM see no other LLM


def test_the_name_of_the_llm_stands_in_front():
    rows = [make_row("a question", "train")]
    plain, named = (encode_recorded(WordTokenizer(), rows, llm).ids[0] for llm in ("", "GPT-4"))
    assert named == [len("LLM:"), len("GPT-4"), *plain]


def test_pooled_logits_are_added_to_the_records_and_nothing_else_changes(tmp_path):
    records = {name: {"id": name, "fold": 0, "closed": 1} for name in RECORDED_SETS}
    sets = [f"{name}.named" for name in RECORDED_SETS]
    for name, record in records.items():
        np.savez(tmp_path / f"{name}.named.npz", folds=np.array([0]))
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    for member in range(4):  # the first member scores the only row of each set
        n = len(sets) if member == 0 else 0
        scores = {"source": np.arange(n), "index": np.zeros(n, int), "logits": np.full((n, 3, 2), 0.5)}
        np.savez(tmp_path / f"pooled-{member}.npz", sets=np.array(sets), facts=np.array("{}"), **scores)
    (tmp_path / "trainings.json").write_text('{"gpt4_nq": []}', encoding="utf-8")
    policy_record.add_pooled(tmp_path, tmp_path, tmp_path)
    for name, record in records.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            assert [json.loads(line) for line in lines] == [{**record, POOLED: [0.5] * 6}]
    assert json.loads((tmp_path / "trainings.json").read_text(encoding="utf-8")) == {"gpt4_nq": [], POOLED: [{}] * 4}


@pytest.mark.parametrize(("pooled", "expected"), [(0.5, ""), (0.4, ""), (0.6, POOLED)])
def test_pooled_adapters_replace_the_own_ones_only_if_they_are_worth_more_on_train_rows(monkeypatch, pooled, expected):
    values = {"": 0.5, POOLED: pooled}
    monkeypatch.setattr(policy_evaluation, "has_pooled", lambda: True)
    monkeypatch.setattr(
        policy_evaluation, "choose", lambda name, judge: SimpleNamespace(estimate=SimpleNamespace(value=values[judge]))
    )
    assert policy_evaluation.choose_judge("gpt4_nq") == expected


@pytest.mark.parametrize(("name", "n_listed"), [("gpt4_nq", 2), ("gpt3_realtimeqa", 0)])
def test_policies_with_pooled_adapters_are_listed_or_come_first_where_they_are_worth_more(name, n_listed):
    own = {"policy": "chosen", "gate": "the own gate"}
    result = policy_evaluation.add_pooled(name, {"policy": own, "others": []})
    is_pooled = ["pooled" in each["policy"] for each in result["others"]]
    assert sum(is_pooled) == n_listed
    if n_listed:  # the chosen policy, and the one for the target share of searches
        assert result["policy"] == own
    else:
        assert result["policy"]["policy"] == "chosen with pooled adapters"
        assert result["others"] == [{**own, "policy": "chosen with the LLM's own adapters"}]
