"""Rules on the command line: asked by default, listed, tried, replaced, left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "vaults"\naction = "retrieve"\nwords = ["vault"]\n', encoding="utf-8")
    return file


def test_small_talk_is_not_looked_up(call: Call, docs: Path):
    (record,) = map(json.loads, call("ask", "Thanks!", "--model", "fake", "--docs", docs, "--json").out.splitlines())
    assert (record["retrieve"], record["rule"], record["passages"]) == (False, "thanks", [])
    assert record["reason"] == "thanks need no documents (rule 'thanks')"


def test_without_rules_the_gate_decides(call: Call, docs: Path):
    outcome = call("ask", "Thanks!", "--model", "fake", "--docs", docs, "--threshold", "0", "--no-rules", "--json")
    assert json.loads(outcome.out)["retrieve"] is True


def test_own_rules_come_before_the_score(call: Call, own: Path):
    asked = ("decide", "the vault?", "the lamp?", "--model", "fake", "--threshold", "1", "--rules", own, "--json")
    assert [json.loads(line)["retrieve"] for line in call(*asked).out.splitlines()] == [True, False]


def test_own_rules_can_stand_in_the_config(call: Call, own: Path, tmp_path: Path):
    (tmp_path / "knowgate.toml").write_text(f'model = "fake"\nthreshold = 1.0\nrules = "{own}"\n', encoding="utf-8")
    assert json.loads(call("decide", "the vault?", "--json").out)["rule"] == "vaults"


@pytest.mark.parametrize("gate", ["always", "never"])
def test_who_wants_always_or_never_gets_it(call: Call, docs: Path, gate: str):
    for asked in ("Thanks!", "What is the latest vault code?"):
        outcome = call("ask", asked, "--model", "fake", "--docs", docs, "--gate", gate, "--json")
        assert json.loads(outcome.out)["retrieve"] is (gate == "always")


def test_always_can_be_told_to_leave_out_what_rules_skip(call: Call, docs: Path):
    asked = ("ask", "Hi", "Who wrote Emma?", "--model", "fake", "--docs", docs, "--gate", "always:rules", "--json")
    assert [json.loads(line)["retrieve"] for line in call(*asked).out.splitlines()] == [False, True]


def test_rules_are_listed_in_their_order(call: Call, own: Path):
    lines = call("rules", "--rules", own).out.splitlines()
    assert lines[1].split()[0] == "vaults"
    assert lines[2].split()[0] == "greeting"


def test_own_rules_are_tested_wherever_the_flag_stands(call: Call, own: Path, tmp_path: Path):
    (tmp_path / "asked.txt").write_text("the vault?\n", encoding="utf-8")
    before, after = (
        call("rules", "--rules", own, "test", "asked.txt"),
        call("rules", "test", "asked.txt", "--rules", own),
    )
    assert before.out == after.out
    assert "gate" not in before.out


def test_rules_are_tried_on_a_file_and_counted(call: Call, tmp_path: Path):
    (tmp_path / "asked.txt").write_text("Hi\n\nWho wrote Emma?\nHello!\n", encoding="utf-8")
    outcome = call("rules", "test", "asked.txt")
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["skip", "gate", "skip"]
    assert outcome.err.split() == ["2", "greeting", "1", "left", "to", "the", "gate"]


def test_json_lines_are_read_for_what_was_said_in_them(call: Call, tmp_path: Path):
    talk = [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Jane Austen"}]
    lines = [
        {"question": "Hi", "answers": ["Cite"]},
        {"text": "谢谢"},
        {"messages": [*talk, {"role": "user", "content": "Thanks!"}]},
        {"id": "4", "question": "Who wrote Emma?"},
    ]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = [json.loads(line) for line in call("rules", "test", "asked.jsonl", "--json").out.splitlines()]
    assert [one["rule"] for one in found] == ["greeting", "thanks", "thanks", None]
    assert found[2]["question"] == "Thanks!"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "Hi"}', "asked.jsonl line 1 has no question"),
        ('{"question": ""}', "asked.jsonl line 1 has no question"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "asked.jsonl line 1 has no question"),
        ("Hi", "asked.jsonl line 1"),
    ],
)
def test_a_json_line_that_says_nothing_is_named(call: Call, tmp_path: Path, line: str, problem: str):
    (tmp_path / "asked.jsonl").write_text(line, encoding="utf-8")
    outcome = call("rules", "test", "asked.jsonl")
    assert outcome.code == 1
    assert problem in outcome.err


def test_what_makes_no_sense_is_said(call: Call, own: Path):
    assert "mutually exclusive" in call("decide", "x", "--rules", own, "--no-rules", "--model", "fake").err
    assert "cannot read the rules" in call("decide", "x", "--rules", "none.toml", "--model", "fake").err
    assert call("rules", "test", "none.txt").code == 1
