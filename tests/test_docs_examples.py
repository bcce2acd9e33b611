"""The examples of the documentation do what their pages say. Knows nothing of how pages are built."""

from __future__ import annotations

import asyncio
import dataclasses
import doctest
import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from knowgate.cli.main import run
from knowgate.errors import ModelError, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.models import load_model
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.retrieval import load_retriever
from knowgate.types import Prompt, SignalRequest, TextEvent
from tests.support import entry_points
from tests.support.planted_run import planted_row, write_run
from tools.pages import EXAMPLES
from tools.structure import ROOT

QUESTIONS = ["What is it?", "What is the capital of the country that borders it in the far north?"]


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_is_shown_and_its_own_examples_run(file, example):
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert f"<!-- example: docs/examples/{file.name} -->" in pages
    assert doctest.testmod(example(file.stem)).failed == 0


def test_the_gate_decides_by_its_option_from_the_command_line(tmp_path, monkeypatch, capsys):
    points = {"knowgate.gates": {"long-answer": "long_answer_gate:LongAnswerGate"}}
    entry_points.install(tmp_path, points, EXAMPLES, monkeypatch)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"short?": "one two", "long?": "one two three"}), encoding="utf-8")
    assert run(["decide", "--json", "--model", f"fake:{table}", "--gate", "long-answer:2", "short?", "long?"]) == 0
    decided = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["gate"], one["need"], one["retrieve"]) for one in decided] == [
        ("long-answer", 0.0, False),
        ("long-answer", 1.0, True),
    ]


def program(tmp_path: Path, code: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(code, encoding="utf-8")
    return shlex.join([sys.executable, str(file)])


@pytest.fixture
def command_model(tmp_path, monkeypatch):
    """Loads the backend for a program, by its spec."""
    points = {"knowgate.models": {"command": "command_model:CommandModel"}}
    entry_points.install(tmp_path, points, EXAMPLES, monkeypatch)
    return lambda code: load_model(f"command:{program(tmp_path, code)}")


def test_the_backend_answers_and_its_draft_can_be_gated(command_model, example):
    model = command_model("print(len(input().split()), 'words')")
    assert [one[0].text for one in model.generate([Prompt("a b c"), Prompt("a")], max_tokens=9)] == [
        "3 words",
        "1 words",
    ]
    gate = example("long_answer_gate").LongAnswerGate(words=1)
    assert AdaptiveRAG(model, gate).decide("What is it?").need == 1.0


def test_the_backend_can_be_streamed_and_awaited(command_model):
    rag = AdaptiveRAG(command_model("print('Paris')"), load_gate("never"))
    assert [event.text for event in rag.answer_stream("Where?") if isinstance(event, TextEvent)] == ["Paris"]
    assert asyncio.run(rag.aanswer("Where?")).text == "Paris"


def test_the_backend_refuses_what_it_does_not_offer(command_model):
    with pytest.raises(UnsupportedSignal, match="nothing else"):
        command_model("").read([Prompt("a")], SignalRequest(samples=2))


def test_a_program_that_fails_is_an_error_with_its_words(command_model):
    with pytest.raises(ModelError, match="no paper"):
        command_model("raise SystemExit('no paper')").generate([Prompt("a")], max_tokens=1)


def test_the_retriever_finds_the_lines_that_share_most_words(tmp_path, monkeypatch):
    points = {"knowgate.retrievers": {"lines": "lines_retriever:LinesRetriever"}}
    entry_points.install(tmp_path, points, EXAMPLES, monkeypatch)
    notes = tmp_path / "notes.txt"
    notes.write_text("Ada wrote the glossary.\n\nThe stove is new.\nBob wrote the index.\n", encoding="utf-8")
    found = load_retriever(f"lines:{notes}").search(["Who wrote the glossary?", "Where?"], 2)
    assert [[(one.id, one.score) for one in passages] for passages in found] == [[("line 1", 3.0), ("line 3", 2.0)], []]


@pytest.fixture
def length_run(tmp_path):
    """Short questions are known, long ones are not."""
    rows = [
        dataclasses.replace(planted_row(str(i), known, 0.0), question=("why " * (3 if known else 9)) + f"{i}?")
        for i in range(120)
        for known in [i % 2 == 0]
    ]
    return write_run(tmp_path / "run", rows)


def test_the_fitted_gate_is_fitted_and_decides_from_the_command_line(tmp_path, monkeypatch, length_run, capsys):
    groups = {"knowgate.fitted_gates": "LengthGate", "knowgate.fits": "fit_length"}
    points = {group: {"length": f"length_gate:{thing}"} for group, thing in groups.items()}
    entry_points.install(tmp_path, points, EXAMPLES, monkeypatch)
    fitted = str(tmp_path / "gate")
    assert run(["fit", "length", "--labels", str(length_run), "--unit", "characters", "--out", fitted]) == 0
    capsys.readouterr()
    assert run(["decide", "--json", "--model", "fake", "--gate", fitted, "--plug-in", *QUESTIONS]) == 0
    short, long = (json.loads(line)["need"] for line in capsys.readouterr().out.splitlines())
    assert short < 0.5 < long
