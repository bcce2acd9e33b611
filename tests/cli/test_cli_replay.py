"""`knowgate replay`: from what `ask --json` prints to a table, and the other way of asking for it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from tests.support.hand_gate import varied_rows, write_gate, write_rows


@pytest.fixture
def log(call, docs, tmp_path):
    """Traffic of the fake model, with a gate that drafts."""
    asked = "\n".join(f"question {number} of the vault" for number in range(30))
    printed = call("ask", "--model", "fake", "--gate", "logprob:mean", "--docs", docs, "--json", stdin=asked.encode())
    (tmp_path / "log.jsonl").write_text(printed.out)
    return tmp_path / "log.jsonl"


def test_the_output_of_ask_can_be_replayed(call, log):
    outcome = call("replay", log, "--thresholds", "0.2,0.8", "--price-search", "0.01")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0.2", "0.5", "0.8"]
    assert "money saved" in lines[0]
    assert "(as it ran)" in lines[2]
    assert "30 questions decided by the gate logprob for fake." in outcome.err


def test_the_logged_threshold_reproduces_the_logged_rate(call, log):
    found = json.loads(call("replay", log, "--json").out)
    retrieved = sum(json.loads(line)["retrieve"] for line in log.read_text().splitlines())
    ran = next(line for line in found["thresholds"] if line["mark"] == "as it ran")
    assert (found["questions"], ran["retrieved"]) == (30, retrieved)
    assert set(ran["risk"]) == {"value", "low", "high"}


def test_a_threshold_without_enough_answers_is_unknown_and_not_recommended(call, log):
    outcome = call("replay", log, "--thresholds", "1")
    row = next(line for line in outcome.out.splitlines() if line.startswith("1 "))
    assert "unknown" in row
    assert "100%" in row.replace(" ", "")  # what is saved is shown all the same
    assert "Do not choose such a threshold" in outcome.err


def test_json_has_every_threshold(call, log):
    found = json.loads(call("replay", log, "--json", "--thresholds", "0.1..0.9").out)
    assert [line["threshold"] for line in found["thresholds"]] == [step / 10 for step in range(1, 10)]


@pytest.fixture
def server_log(tmp_path):
    """Two requests that skipped the search and two that retrieved, each with a draft that takes a second."""
    decision = {"gate": "logprob", "threshold": 0.5, "way": "draft", "milliseconds": {"draft": 1000, "total": 1100}}
    with closing(sqlite3.connect(tmp_path / "log.db")) as database:
        database.execute("CREATE TABLE decisions (id TEXT, at REAL, record TEXT)")
        for at, need in enumerate((0.1, 0.2, 0.8, 0.9)):
            record = json.dumps({**decision, "need": need, "retrieve": need > 0.5})
            database.execute("INSERT INTO decisions VALUES (?, ?, ?)", (str(at), at, record))
        database.commit()
    return "log.db"


def test_money_includes_the_llm_calls_that_the_gate_adds(call, server_log):
    prices = ("--price-search", "0.005", "--price-llm-call", "0.002")
    outcome = call("replay", server_log, "--thresholds", "0.5", *prices)
    # Two searches saved, less two more calls; always retrieving takes four of both.
    assert outcome.out.splitlines()[1].endswith("0.006 (21%)")
    assert "not priced" not in outcome.err
    money = json.loads(call("cost", server_log, *prices, "--json").out)["money"]
    assert 4 * (money["always"] - money["gated"]) / 1000 == pytest.approx(0.006)


def test_llm_calls_without_a_price_are_announced_if_there_is_money(call, server_log):
    note = "extra LLM calls are not priced (--price-llm-call)"
    assert note in call("replay", server_log, "--price-search", "0.005").err
    assert note not in call("replay", server_log).err


def test_what_takes_longer_than_always_retrieving_is_said_in_words(call, server_log):
    # Always retrieving takes 4 x 0.1 s; the gate adds four drafts of a second.
    row = call("replay", server_log, "--thresholds", "0.5").out.splitlines()[1]
    assert row.endswith("4 s more (1000%)")
    dear = call("replay", server_log, "--thresholds", "0.1", "--price-search", "0.005", "--price-llm-call", "0.01").out
    assert "0.025 more (42%)" in dear  # one search saved, three more calls


def test_bad_lines_are_shown(call, log):
    log.write_text(log.read_text() + "oops\n")
    outcome = call("replay", log)
    assert outcome.code == 0
    assert "Lines left out: 1 because the line is not JSON, first in line 31." in outcome.err


def test_the_output_of_decide_gives_only_rates(call, tmp_path):
    printed = call("decide", "a", "b", "--model", "fake", "--json")
    (tmp_path / "log.jsonl").write_text(printed.out)
    outcome = call("replay", "log.jsonl")
    assert outcome.code == 0
    assert "Lost answers are unknown" in outcome.err


def test_a_label_run_is_graded(call, tmp_path):
    write_gate(tmp_path / "gate", threshold=0.35)
    write_rows(tmp_path / "run", varied_rows(100))
    outcome = call("replay", "run", "--gate", "gate")
    assert "right answers lost, of all" in " ".join(outcome.out.split())
    assert "0.35 (the gate's own)" in outcome.out


def test_the_threshold_of_a_fitted_gate_can_be_tried_on_its_log(call, log, tmp_path):
    lines = [json.loads(line) | {"gate": "fusion"} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_gate(tmp_path / "gate", threshold=0.35)
    assert "0.35 (the gate's own)" in call("replay", log, "--gate", "gate").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--thresholds", "high"], "--thresholds 'high' is not valid"),
        (["--thresholds", "0.9..0.1"], "--thresholds '0.9..0.1' is not valid"),
        (["--thresholds", "1.5"], "numbers from 0 to 1"),
        (["--gate", "prompt"], "A threshold applies to one gate only"),
    ],
)
def test_invalid_options_are_explained(call, log, options, message):
    outcome = call("replay", log, *options)
    assert (outcome.code, message in outcome.err, outcome.out) == (1, True, "")


def test_an_empty_log_is_an_error(call, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    outcome = call("replay", "empty.jsonl")
    assert (outcome.code, "the file is empty" in outcome.err) == (1, True)
