"""Commands that make something, what they make it from, and what they made, without its times: for tests of faults."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from knowgate.data.runs.folder import RunFolder
from tests.support.mortal import Mortal

N = 120
IMPORTED = ["tests.support.hashed_history", "knowgate.training.gate_artifact", "knowgate.training.probe",
            "sklearn.linear_model", "scipy.stats",
            *(f"knowgate.cli.{name}" for name in
              ("label", "index", "fit", "history", "reranker", "eval", "calibrate", "report"))]  # fmt: skip
LABEL = ["label", "--data", "jsonl:q.jsonl", "--model", "fake:t.json", "--samples", "2", "--layers", "mid"]
FIT = ["fit", "probe", "--kind", "linear", "--labels", "run", "--target", "known"]
COMMANDS = {
    "label": [*LABEL, "--out", "{}"],
    "index": ["index", "docs.jsonl", "--out", "{}"],
    "index, brought up to date": ["index", "more.jsonl", "--out", "{}"],
    "fit": [*FIT, "--out", "{}"],
    "history import": ["history", "import", "run", "--history", "{}"],
    "prefer": ["prefer", "--labels", "run", "--source", "benefit", "--data", "jsonl:q.jsonl", "--model", "fake:t.json",
               "--out", "{}"],
    "eval": ["eval", "--labels", "run", "--gates", "logprob:mean", "--resamples", "20", "--out", "{}"],
    "calibrate": ["calibrate", "{}", "--labels", "more-run", "--best-accuracy"],
    "calibrate, a copy": ["calibrate", "gate", "--labels", "more-run", "--best-accuracy", "--out", "{}"],
    "report": ["report", "run", "--out", "{}.html"],
}  # fmt: skip
FIRST = {"index, brought up to date": COMMANDS["index"], "calibrate": COMMANDS["fit"]}  # what must be there before
TIMES = {"seconds", "created", "started", "updated", "totals", "checksum"}


def prepare(folder: Path) -> None:
    """Questions, documents, and a fake model that knows every other answer."""
    for name, numbers in (("q", range(N)), ("other", range(N, 2 * N))):
        _write(folder / f"{name}.jsonl", [_question(i) for i in numbers])
    documents = [{"id": f"d{i}", "title": f"Lamp {i}", "text": f"Lamp {i} has the colour {_hue(i)}."} for i in range(N)]
    _write(folder / "docs.jsonl", documents)
    _write(folder / "more.jsonl", [*documents[10:], {"id": "new", "title": "New", "text": "A new lamp is green."}])
    entries = [_entry(i) for i in range(2 * N)]
    table = {entry.pop("question"): entry for entry in entries}
    (folder / "t.json").write_text(json.dumps(table), encoding="utf-8")


def prepare_runs(runner: Mortal, folder: Path) -> None:
    """A label run, another with other questions, and a gate fitted on the first."""
    others = [word.replace("q.jsonl", "other.jsonl") for word in LABEL]
    for words in ([*LABEL, "--out", "run"], [*others, "--out", "more-run"], [*FIT, "--out", "gate"]):
        end = runner.run(*words, cwd=folder)
        assert end.code == 0, end.words


def begin(runner: Mortal, folder: Path, name: str, out: str) -> None:
    """Where a command changes something that is there: make it."""
    if name in FIRST:
        end = runner.run(*(word.format(out) for word in FIRST[name]), cwd=folder)
        assert end.code == 0, end.words


def command(name: str, out: str) -> list[str]:
    return [word.format(out) for word in COMMANDS[name]]


def _hue(i: int) -> str:
    return f"hue{i % 7}x"


def _question(i: int) -> dict[str, Any]:
    contexts = [{"id": f"d{i}", "text": f"Lamp {i} is {_hue(i)}."}, {"id": f"e{i}", "text": f"Lamp {i} is in a room."}]
    return {"id": f"q{i}", "question": f"What is the colour of lamp {i}?", "answers": [_hue(i)], "contexts": contexts}


def _entry(i: int) -> dict[str, Any]:
    closed = _hue(i) if i % 2 else "?"
    question = f"What is the colour of lamp {i}?"
    return {"question": question, "closed": closed, "known": bool(i % 2), "open": _hue(i), "when": _hue(i)}


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


# --- what was made --------------------------------------------------------------------------------


def content(folder: Path, out: str) -> Any:
    """All that a result says, without its times."""
    path = folder / out
    if path.is_file():
        columns = "question, label, outcome, source, weight, model, prompts, tenant, hex(vector)"
        with sqlite3.connect(path) as db:
            return sorted(db.execute(f"SELECT {columns} FROM entries").fetchall())
    if (path / "run.json").is_file():
        return _label_content(path)
    if not path.exists():
        return (folder / f"{out}.html").read_text(encoding="utf-8")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {file.relative_to(path).as_posix(): _file_content(file) for file in files}


def left_over(folder: Path, out: str) -> list[str]:
    """Halves of files that nobody will ever finish."""
    inside = [path.name for path in (folder / out).glob(".*")] if (folder / out).is_dir() else []
    beside = [path.name for path in folder.glob(f".{out}.*")]
    return [name for name in inside + beside if name != ".lock"]


def _file_content(file: Path) -> Any:
    if file.suffix == ".json":
        return _timeless(json.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    if file.suffix == ".safetensors":
        return {name: block.tolist() for name, block in load_file(file).items()}
    return [line for line in file.read_bytes().splitlines() if b"--out" not in line]  # a card says what made it


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMES}


def _label_content(path: Path) -> Any:
    """Row by row, in order, each with its hidden states: which file they lie in may differ."""
    folder = RunFolder(path)
    rows = list(folder.rows())
    records = [{**record, "vector": None} for record in _file_content(path / "labels.jsonl")]
    states = np.concatenate([folder.vectors(rows, name) for name in folder.vector_names()], axis=1)
    return list(zip(records, states.tolist(), strict=True))
