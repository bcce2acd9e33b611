"""What the commands print: data on stdout, nothing taken for markup, JSON by the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from knowgate.cli.doctor import Finding, summarize_findings
from tests.cli.conftest import Call
from tests.support.extras import needs_local

KEYS = {"question", "answer", "retrieve", "need", "threshold", "gate", "model", "passages", "tokens"}


def test_json_is_one_object_per_question(call: Call, docs: Path):
    outcome = call("ask", "法国的首都是哪里？", "a\nb", "--model", "fake", "--docs", docs, "--json")
    records = [json.loads(line) for line in outcome.out.splitlines()]
    assert [record["question"] for record in records] == ["法国的首都是哪里？", "a\nb"]
    assert all(set(record) >= KEYS for record in records)
    assert (outcome.code, outcome.err) == (0, "")


def test_decide_reads_all_of_stdin_in_order(call: Call):
    asked = [f"question {number}" for number in range(150)]  # more than two batches
    outcome = call("decide", "--model", "fake", "--json", stdin="\n".join(asked).encode())
    assert [json.loads(line)["question"] for line in outcome.out.splitlines()] == asked


def test_empty_lines_are_skipped_but_counted(call: Call):
    outcome = call("ask", "--model", "fake", "--gate", "never", "--json", stdin=b"a\n\nb\n\n")
    records = [json.loads(line) for line in outcome.out.splitlines()]
    assert [record["id"] for record in records] == ["1", "3"]


def test_questions_answered_together_have_no_times_of_their_own(call: Call):
    outcome = call("ask", *"abc", "--model", "fake", "--gate", "never", "--json")
    alone, *together = [json.loads(line) for line in outcome.out.splitlines()]
    assert "seconds" in alone
    assert [record["batch"] for record in together] == [2, 2]


def test_markup_in_questions_and_passages_is_printed_literally(call: Call, docs: Path):
    outcome = call("ask", "[red]lamp[/red] [/x]", "--model", "fake", "--docs", docs, "--gate", "always")
    assert "The [red]lamp[/red] is [/bold] on." in outcome.out


def test_markup_in_an_answer_is_printed_literally(call: Call, tmp_path: Path):
    (tmp_path / "table.json").write_text(json.dumps({"who": "[red]x[/bold]"}))
    assert "[red]x[/bold]" in call("ask", "who?", "--model", "fake:table.json", "--gate", "never").out


@pytest.mark.parametrize("name", ["[red]x", "x[/red]", "[bold]"])
def test_markup_in_an_error_is_printed_literally(call: Call, name: str):
    assert f"unknown model '{name}'." in call("decide", "who?", "--model", name).err


def test_control_characters_of_an_answer_do_not_reach_the_terminal(call: Call, tmp_path: Path):
    (tmp_path / "table.json").write_text(json.dumps({"who": "a\x1b[2Jb"}))
    outcome = call("ask", "who?", "--model", "fake:table.json", "--gate", "never")
    assert "\x1b" not in outcome.out
    assert "a\\x1b[2Jb" in outcome.out


def test_a_long_line_is_not_broken(call: Call, tmp_path: Path):
    answer = "word" * 500
    (tmp_path / "table.json").write_text(json.dumps({"who": answer}))
    assert answer in call("ask", "who?", "--model", "fake:table.json", "--gate", "never").out.splitlines()


def test_no_color_gives_no_escape_codes(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in call("decide", "who?", "--model", "fake").out


def test_without_arguments_the_help_is_printed(call: Call):
    outcome = call()
    assert outcome.code == 0
    assert "decide" in outcome.out


def test_the_version_is_printed(call: Call):
    assert call("--version").out.startswith("knowgate 0.")


def test_gates_models_and_doctor_print_their_tables(call: Call):
    assert "logprob" in call("gates").out
    assert "smollm" in call("models").out
    assert "not downloaded yet" in call("doctor").out


@needs_local
def test_doctor_is_short_and_ends_with_a_verdict(call: Call):
    lines = call("doctor").out.splitlines()
    assert len(lines) < 25
    assert lines[-1].startswith("Ready. To add ")
    assert "torch" not in [line.split()[0] for line in lines]


def test_doctor_tells_everything_when_asked(call: Call):
    assert "torch" in [line.split()[0] for line in call("doctor", "--all").out.splitlines()]


def test_the_verdict_of_the_doctor_counts_what_is_broken_first():
    broken, missing, good = (
        Finding("a", "", "repair it", is_broken=True),
        Finding("b", "", "pip install b"),
        Finding("c", ""),
    )
    assert summarize_findings([broken, missing, good], "knowgate demo").plain.startswith("Not ready: 1 broken.")
    assert summarize_findings([missing, good], "knowgate demo").plain.startswith("Ready. To add 1 optional parts")
    assert summarize_findings([good], "knowgate demo").plain == "All 1 checks passed. Next: knowgate demo"


def test_index_says_what_it_did_on_stderr(call: Call, docs: Path):
    outcome = call("index", docs, "--out", "made")
    assert outcome.out == ""
    assert "2 documents, 2 passages in made." in outcome.err
    assert outcome.err.endswith("Ask: knowgate ask --index made -i\n")
