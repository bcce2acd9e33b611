"""How the runs behind the tables were made, from what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.common import CHOICE, FRESH, MODELS, OPEN, RUNS, Rows, table

COLUMNS = ("LLM", "data set", "train", "test", "samples", "passages by", "k", "longest answer", "graded by", "made")


def provenance_table() -> Iterator[str]:
    rows = [line for model in MODELS for name in (*OPEN, *CHOICE, FRESH) for line in _line(model, name)]
    if rows:
        yield "## The recorded runs\n"
        yield (
            "From the `run.json` of each test run. Passages by: the retriever with the fingerprint of its index; own: "
            "those the data set comes with. Multiple choice is graded by letter.\n"
        )
        yield table(COLUMNS, rows)


def _line(model: str, name: str) -> Rows:
    test = _manifest(RUNS / model / f"{name}-test")
    if test is None:
        return []
    train, settings = _manifest(RUNS / model / f"{name}-train"), test["settings"]
    return [
        (
            model, name, "–" if train is None else str(train["settings"]["questions"]), str(settings["questions"]),
            str(settings["samples"]), _passages(settings), str(settings.get("k") or "–"), str(settings["max_tokens"]),
            settings["grader"], str(test["started"])[:10],
        )
    ]  # fmt: skip


def _manifest(run: Path) -> dict[str, Any] | None:
    from knowgate.data.runs.folder import RunFolder

    return RunFolder(run).manifest() if run.is_dir() else None


def _passages(settings: dict[str, Any]) -> str:
    if not settings.get("open_book", True):
        return "–"
    fingerprint = settings.get("retriever_fingerprint")
    if fingerprint:
        return f"{settings['retriever']} ({fingerprint})"
    before = str(settings["data"]).partition("+")[2]  # by which the passages were put beside the questions
    return f"{before}, top 3 (its index was not recorded)" if before else "own"
