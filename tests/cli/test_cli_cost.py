"""`knowgate cost`: the bill of 1,000 questions."""

from __future__ import annotations

import json

import pytest

from knowgate.evaluation.replay import Prices
from tests.support.hand_gate import varied_rows, write_gate, write_rows


@pytest.fixture
def log(call, docs, tmp_path):
    asked = "\n".join(f"question {number} of the vault" for number in range(30))
    printed = call("ask", "--model", "fake", "--gate", "logprob:mean", "--docs", docs, "--json", stdin=asked.encode())
    (tmp_path / "log.jsonl").write_text(printed.out)
    return tmp_path / "log.jsonl"


def test_costs_of_a_log_use_its_threshold(call, log):
    outcome = call("cost", log, "--price-search", "0.01")
    retrieved = sum(json.loads(line)["retrieve"] for line in log.read_text().splitlines())
    lines = outcome.out.splitlines()
    assert lines[0].startswith("The gate saves")
    assert "per 1,000 questions, in the currency of your prices." in lines[0]
    assert [line.split()[0] for line in lines[3:]] == ["always", "never", "gated"]
    assert lines[3].split()[1] == "10"  # 1,000 searches for a cent each
    assert float(lines[5].split()[1]) == pytest.approx(10 * retrieved / 30, rel=1e-3)


def test_prices_of_a_file_can_be_overridden(call, log, tmp_path):
    (tmp_path / "prices.toml").write_text("search = 0.01\noutput_token = 1e-6\n")
    found = json.loads(call("cost", log, "--prices", "prices.toml", "--price-search", "0.02", "--json").out)
    assert (found["prices"]["retrieval"], found["prices"]["output_token"]) == (0.02, 1e-6)


def test_assumed_prices_are_announced(call, log):
    outcome = call("cost", log)
    assert "These are default prices in US dollars" in outcome.err
    assert "in US dollars" in outcome.out.splitlines()[0]


def test_a_label_run_shows_how_many_answers_are_lost(call, tmp_path):
    write_gate(tmp_path / "gate", threshold=0.35)
    write_rows(tmp_path / "run", varied_rows(100))
    found = json.loads(call("cost", "run", "--gate", "gate", "--json").out)
    assert found["threshold"] == 0.35
    assert found["per_question"]["always"]["lost"]["hits"] == 0
    assert found["per_question"]["never"]["lost"]["hits"] > 0
    gated = found["per_question"]["gated"]
    lost, gained = gated["lost"]["hits"], gated["gained"]["hits"]
    change = f"{10 * (gained - lost):+.1f} per 1,000 questions ({lost} lost and {gained} gained among 100 graded"
    said = f"Right answers, against always retrieving: {change} questions)."
    assert said in call("cost", "run", "--gate", "gate").out.splitlines()[0]


def test_a_threshold_can_be_given_and_is_validated(call, log):
    assert json.loads(call("cost", log, "--threshold", "0", "--json").out)["threshold"] == 0
    refused = call("cost", log, "--threshold", "2")
    assert (refused.code, "between 0 and 1" in refused.err) == (1, True)


def test_a_negative_price_is_rejected(call, log):
    refused = call("cost", log, "--price-gpu-hour", "-1")
    assert (refused.code, "--price-gpu-hour" in refused.err) == (2, True)


def test_missing_amounts_are_named_with_the_flag_that_leaves_them_out(call, tmp_path):
    printed = call("decide", "a", "b", "--model", "fake", "--json")
    (tmp_path / "log.jsonl").write_text(printed.out)
    said = call("cost", "log.jsonl", "--price-search", "0.01", "--price-output-token", "1e-6").out
    assert "to leave them out: --price-output-token 0" in said


def test_unpriced_llm_calls_are_not_counted_as_free(call, log):
    said = call("cost", log, "--price-search", "0").out
    assert "The gate is cheaper at any price" not in said
    assert "they have no price, so the total is unknown" in said


def test_one_token_price_counts_for_prompts_and_generated_tokens():
    assert Prices(token=2.0) == Prices(input_token=2.0, output_token=2.0)
    assert Prices(token=2.0, output_token=5.0).to_dict()["output_token"] == 5.0
