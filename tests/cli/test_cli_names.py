"""One name for one thing; old names still work and say the new one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from knowgate.cli.commands import COMMANDS
from knowgate.cli.fit import RENAMED_GATE_OPTIONS, RENAMED_OPTIONS
from tests.cli.conftest import Call

OLD = [
    *((name, old, new) for name, verb in COMMANDS.items() for old, new in verb.renamed.items()),
    *(("fit ik", old, new) for old, new in RENAMED_OPTIONS.items()),
    *((f"fit {gate}", old, new) for gate, names in RENAMED_GATE_OPTIONS.items() for old, new in names.items()),
]


@pytest.mark.parametrize(("command", "old", "new"), OLD)
def test_the_help_shows_the_new_name_only(call: Call, command: str, old: str, new: str):
    shown = call(*command.split(), "--help").out
    assert f"{new} " in shown
    assert f"{old} " not in shown


@pytest.mark.parametrize("given", [["--kind", "bm25"], ["--kind=bm25"]])
def test_index_takes_its_old_option_with_a_note(call: Call, docs: Path, given: list[str]):
    done = call("index", docs, "--out", "made", *given)
    assert done.code == 0
    assert done.err.splitlines()[0] == "Note: --kind is now called --retriever."
    assert Path("made").is_dir()


def test_the_new_option_says_nothing(call: Call, docs: Path):
    assert "Note" not in call("index", docs, "--out", "made", "--retriever", "bm25").err


def test_imported_answers_take_the_old_name_of_the_model(call: Call, tmp_path: Path):
    row = {"id": "1", "question": "who?", "answers": ["me"], "meta": {"said": "me"}}
    (tmp_path / "data.jsonl").write_text(json.dumps(row), encoding="utf-8")
    done = call("import-answers", "--data", "jsonl:data.jsonl", "--llm", "gpt", "--closed", "said", "--out", "run")
    assert (done.code, done.err.splitlines()[0]) == (0, "Note: --llm is now called --model.")
    assert "gpt" in (tmp_path / "run" / "run.json").read_text(encoding="utf-8")


def test_imported_answers_may_stand_at_the_top_of_a_line(call: Call, tmp_path: Path):
    row = {"question": "who?", "answers": ["me"], "answer": "you", "answer_with_passages": "me"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(row), encoding="utf-8")
    given = ["--data", "jsonl:asked.jsonl", "--model", "gpt", "--closed", "answer", "--open", "answer_with_passages"]
    assert call("import-answers", *given, "--out", "run").code == 0
    (written,) = (tmp_path / "run" / "labels.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(written)["benefit"] == 1


def test_the_learning_rate_takes_its_old_name(call: Call):
    done = call("fit", "reranker", "--rate", "1e-5", "--pref", "nothing", "--out", "x")
    assert done.err.splitlines()[0] == "Note: --rate is now called --learning-rate."
    assert "nothing" in done.err.splitlines()[1]


def test_words_after_two_dashes_are_not_options(call: Call, docs: Path):
    assert "Note" not in call("index", "--out", "made", "--", "--kind").err
