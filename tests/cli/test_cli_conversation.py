"""Conversations on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call

TABLE = {"Last question": "When was Jane Austen born?", "born": "1775", "Emma": "Jane Austen"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    return "fake:table.json"


def test_a_conversation_ends_at_an_empty_line(call: Call, model: str):
    said = b"Who wrote Emma?\nWhen was she born?\n\nNever read.\n"
    outcome = call("ask", "-i", "--model", model, "--gate", "never", "--json", stdin=said)
    first, second = map(json.loads, outcome.out.splitlines())
    assert (first["answer"], first.get("asked")) == ("Jane Austen", None)
    assert (second["question"], second["asked"]) == ("When was Jane Austen born?", "When was she born?")


def test_what_is_understood_is_shown(call: Call, model: str):
    outcome = call("ask", "-i", "Who wrote Emma?", "When was she born?", "--model", model, "--gate", "never")
    assert "understood as: When was Jane Austen born?" in outcome.out


def test_a_line_may_be_a_conversation(call: Call, model: str):
    messages = [
        {"role": "user", "content": "Who wrote Emma?"},
        {"role": "assistant", "content": "Jane Austen"},
        {"role": "user", "content": "When was she born?"},
    ]
    line = json.dumps({"messages": messages}).encode() + b"\n"
    outcome = call("ask", "--model", model, "--gate", "never", "--json", stdin=line)
    assert json.loads(outcome.out)["question"] == "When was Jane Austen born?"


@pytest.mark.parametrize("command", ["ask", "decide"])
def test_a_line_of_a_file_of_questions_is_its_question(call: Call, model: str, command: str):
    lines = ['{"id": "a", "question": "Who wrote Emma?", "answers": ["Jane Austen"]}', '{"question" stays as it is}']
    outcome = call(command, "--model", model, "--gate", "never", "--json", stdin="\n".join(lines).encode())
    assert [json.loads(line)["question"] for line in outcome.out.splitlines()] == ["Who wrote Emma?", lines[1]]


def test_messages_that_are_none_are_refused(call: Call, model: str):
    outcome = call("ask", "--model", model, "--gate", "never", stdin=b'{"messages": "hello"}\n')
    assert "line 1: 'messages' must be a list of objects" in outcome.err
