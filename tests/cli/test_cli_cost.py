"""`knowgate cost`: the bill of 1,000 questions."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.replay import Prices
from knowgate.gates.artifacts.gate_folder import read_artifact, revise_artifact
from tests.support.hand_gate import varied_rows, write_gate, write_rows
from tests.support.pairs_by_hand import pair_rows
from tests.support.runs_by_hand import row, side, write_run
from tests.support.trials_by_hand import SETTINGS


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
    assert lines[0].startswith(f"The gate skips {1 - retrieved / 30:.0%} of the searches. In all, it saves ")
    assert "per 1,000 questions, in the currency of your prices." in lines[0]
    assert [line.split()[0] for line in lines[3:]] == ["always", "never", "gated"]
    assert lines[3].split()[1] == "10"  # 1,000 searches for a cent each
    assert float(lines[5].split()[1]) == pytest.approx(10 * retrieved / 30, rel=1e-3)


def test_prices_of_a_file_can_be_overridden(call, log, tmp_path):
    (tmp_path / "prices.toml").write_text("search = 0.01\nllm_call = 0.002\noutput_token = 1e-6\n")
    found = json.loads(call("cost", log, "--prices", "prices.toml", "--price-search", "0.02", "--json").out)
    assert found["prices"] == {
        "retrieval": 0.02,
        "llm_call": 0.002,
        "input_token": 0.0,
        "output_token": 1e-6,
        "gpu_hour": 0.0,
    }


def test_a_small_server_log_shows_what_it_records_and_nothing_else(call, tmp_path):
    """Two searched with a draft, one skipped, one skipped by a rule: 1.5 LLM calls and half of the searches."""
    decision = {"gate": "logprob", "threshold": 0.5, "milliseconds": {"total": 10.0}}
    records = [
        {**decision, "way": "draft", "retrieve": True, "need": 0.9},
        {**decision, "way": "race", "retrieve": True, "need": 0.8},
        {**decision, "way": "draft", "retrieve": False, "need": 0.1},
        {**decision, "way": "question", "retrieve": False, "need": 0.9, "rule": "thanks"},
    ]
    with closing(sqlite3.connect(tmp_path / "log.db")) as database:
        database.execute("CREATE TABLE decisions (id TEXT, at REAL, record TEXT)")
        database.executemany(
            "INSERT INTO decisions VALUES (?, ?, ?)",
            [(str(at), at, json.dumps(item)) for at, item in enumerate(records)],
        )
        database.commit()
    outcome = call("cost", "log.db")
    assert outcome.out.startswith(
        "The gate skips 50% of the searches. In all, it saves 2.5 in searches per 1,000 questions"
    )
    assert "The gate makes 1.50 LLM calls per question where always retrieving makes 1" in outcome.out
    assert "It is cheaper if a call costs less than 0.005." in outcome.out
    assert "Not counted" not in outcome.out  # logprob runs no judge
    with closing(sqlite3.connect(tmp_path / "log.db")) as database:
        database.execute("UPDATE decisions SET record = replace(record, '\"logprob\"', '\"judge\"')")
        database.commit()
    assert "Not counted: running the judge.\n" in call("cost", "log.db").out
    assert "unknown" not in outcome.out
    assert "Fewer than 100 prove little." in outcome.err
    priced = call("cost", "log.db", "--price-search", "0.005", "--price-llm-call", "0.004").out
    assert [line.split()[1] for line in priced.splitlines()[3:]] == ["9", "4", "8.5"]
    assert (
        json.loads(call("cost", "log.db", "--threshold", "0", "--json").out)["per_question"]["gated"]["searches"]
        == 0.75
    )


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
    assert (refused.code, "--threshold" in refused.err) == (2, True)


def test_a_negative_price_is_rejected(call, log):
    refused = call("cost", log, "--price-gpu-hour", "-1")
    assert (refused.code, "--price-gpu-hour" in refused.err) == (2, True)


def test_missing_amounts_are_named_with_the_flag_that_leaves_them_out(call, tmp_path):
    printed = call("decide", "a", "b", "--model", "fake", "--json")
    (tmp_path / "log.jsonl").write_text(printed.out)
    said = call("cost", "log.jsonl", "--price-search", "0.01", "--price-output-token", "1e-6").out
    assert "To leave these amounts out, set their prices to 0: --price-output-token 0." in said


def test_unpriced_llm_calls_are_not_counted_as_free(call, log):
    said = call("cost", log, "--price-search", "0").out
    assert "The gate is cheaper at any price" not in said
    assert "The money leaves out LLM calls, which have no price. The gate makes" in said


def test_rows_without_texts_count_the_same_llm_calls_as_eval(call, tmp_path):
    """The gate skips one question in four: 0.75 more calls. 0.25 x 0.005 - 0.75 x 0.001 = 0.0005 saved per question."""
    pytest.importorskip("scipy", reason="`eval` needs the extra 'train'")
    rows = [row(f"q{i}", side(i % 4 == 0, text=""), side(text=""), question="") for i in range(400)]
    run = write_run(tmp_path / "run", rows, **SETTINGS)
    write_needs(run, [RecordedNeeds("my-judge", 0.5, {item.id: 0.1 if item.closed.correct else 0.9 for item in rows})])
    prices = ("--price-search", "0.005", "--price-llm-call", "0.001")
    bill = json.loads(call("cost", "run", "--gate", "my-judge", *prices, "--json").out)
    verdict = call("eval", "--labels", "run", "--gates", "my-judge", *prices, "--no-html").out
    gated = bill["per_question"]["gated"]
    assert (gated["calls"], bill["per_question"]["always"]["calls"]) == (1.75, 1.0)
    assert "0.75 searches and 1.75 LLM calls" in verdict
    assert bill["money"]["always"] - bill["money"]["gated"] == pytest.approx(0.5)
    assert "saves 25,000 searches and $50.00" in verdict
    amounts = [bill["per_question"][name][key] for name in bill["money"] for key in ("prompt", "completion", "gpu")]
    assert amounts == [None] * 9
    assert "LLM time" not in call("cost", "run", "--gate", "my-judge", *prices).out


def test_one_token_price_counts_for_prompts_and_generated_tokens():
    assert Prices(token=2.0) == Prices(input_token=2.0, output_token=2.0)
    assert Prices(token=2.0, output_token=5.0).to_dict()["output_token"] == 5.0


@pytest.fixture
def policy(tmp_path):
    """A gate that always retrieves, followed by the rules arbiter, and a run to try it on."""
    folder = write_gate(tmp_path / "policy", threshold=-1.0)
    artifact = read_artifact(folder)
    revise_artifact(artifact, {**artifact.manifest, "policy": {"arbiter": "rules"}}, {}, artifact.path)
    # The rules prefer the draft if the answer with passages is that there is no answer.
    rows = [
        item if item.open.correct else replace(item, open=replace(item.open, text="I do not know."))
        for item in pair_rows(100)
    ]
    write_rows(tmp_path / "run", rows)
    return folder


def test_the_arbiter_of_a_policy_counts_in_calls_and_right_answers(call, policy):
    pytest.importorskip("scipy", reason="`eval` needs the extra 'train'")
    whole = json.loads(call("cost", "run", "--gate", "policy", "--json").out)
    gate_alone = json.loads(call("cost", "run", "--gate", "policy", "--arbiter", "none", "--json").out)
    assert (whole["arbiter"], gate_alone["arbiter"]) == ("rules", "")
    assert (whole["per_question"]["gated"]["calls"], whole["per_question"]["always"]["calls"]) == (2.0, 1.0)
    assert gate_alone["per_question"]["gated"]["gained"]["hits"] == 0
    cascade = evaluate(str(policy), "run").cascade
    line = next(result for result in cascade.results if result.gate == "policy")
    gated = whole["per_question"]["gated"]
    assert (gated["calls"], gated["gained"]["value"], gated["lost"]["value"]) == pytest.approx(
        (line.calls, line.gained, line.harmed)
    )
    assert line.gained > 0
    assert cascade.is_policy
    printed = call("eval", "--labels", "run", "--gates", "policy").out
    assert "The policy as it runs: the arbiter rules chooses" in printed
    assert "each at its own threshold, without the arbiter" in printed
    assert "with the arbiter rules" in call("replay", "run", "--gate", "policy").err


@pytest.mark.parametrize("command", ["cost", "replay"])
def test_a_label_run_without_a_gate_suggests_to_fit_a_policy(call, tmp_path, command):
    write_rows(tmp_path / "run", varied_rows(10))
    assert "knowgate fit --labels run --out my-policy" in call(command, "run").err


def test_an_evaluation_without_gates_suggests_to_fit_a_policy(call, tmp_path):
    write_rows(tmp_path / "run", varied_rows(120))
    outcome = call("eval", "--labels", "run", "--gates", "always")
    assert outcome.out.startswith("Cannot be said: No gate could be evaluated on these rows.")
    assert "Next: knowgate fit --labels run --out my-policy" in outcome.err


def test_an_arbiter_needs_a_label_run(call, log):
    assert "--arbiter works only with a label run" in call("cost", log, "--arbiter", "rules").err
