"""The benchmark that leaves one LLM out: neither that LLM nor a question of its test rows is trained on."""

import json

import numpy as np
import pytest

from benchmarks.any_llm_judge import (
    LLMS,
    RESULTS,
    VARIANTS,
    FeatureTable,
    RecordedAnswer,
    Setting,
    score_test_rows,
)
from benchmarks.consistency import SAMPLES, index_partitions
from knowgate.data.signals.samples import certainty

SETTING = Setting("question features", 0.1, True)


def make_table(texts, seed):
    rng = np.random.default_rng(seed)
    rows = [RecordedAnswer(llm, "set", text, "draft", bool(i % 2)) for llm in LLMS for i, text in enumerate(texts)]
    return FeatureTable(rows, {"question": rng.normal(size=(len(rows), 3))})


def test_the_left_out_llm_and_the_questions_of_its_test_rows_are_not_trained_on():
    train = make_table([f"q{i}" for i in range(20)], 0)
    test = make_table([*[f"Q{i}?" for i in range(5)], *[f"t{i}" for i in range(15)]], 1)
    report = score_test_rows(train, test, SETTING)
    # five other LLMs with 20 train rows each, less the five questions that differ only in case and punctuation
    assert {item["trained_on"] for item in report["llms"].values()} == {5 * (20 - 5)}
    own = score_test_rows(train, test, SETTING, own=True)
    assert {item["trained_on"] for item in own["llms"].values()} == {20 - 5}


def test_the_committed_results_cover_every_variant_and_follow_the_rule():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert {entry["variant"] for entry in results["test"]} == set(VARIANTS)
    chosen = next(entry for entry in results["test"] if entry["variant"] == results["chosen"])
    assert chosen["least"] == min(item["mean"] for item in chosen["llms"].values())
    assert results["ships"] == (chosen["least"] >= results["minimum"])


@pytest.mark.parametrize("counts", [(30,), (29, 1), (10, 10, 10), (1,) * 30])
def test_the_certainty_of_samples_tells_how_often_each_answer_occurred(counts):
    answers = [str(number) for number, count in enumerate(counts) for _ in range(count)]
    assert len(answers) == SAMPLES
    assert counts in index_partitions()[round(certainty(answers), 6)]
