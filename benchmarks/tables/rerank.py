"""The aligned reranker, and gates fitted on one data set or LLM and used on another: tables made where the LLM was."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tables.common import RUNS


def rerank_table() -> Iterator[str]:
    file = RUNS / "rerank.md"
    if file.is_file():
        yield "## Reranker aligned with the LLM's confidence (CBDR)\n"
        yield "Recorded by `benchmarks/rerank_table.py` on preferences made with `knowgate prefer`.\n"
        lines = file.read_text().splitlines()[2:]  # without its own title
        yield "\n".join(f"#{line}" if line.startswith("##") else line for line in lines) + "\n"


def matrices() -> Iterator[str]:
    file = RUNS / "matrices.md"
    if file.is_file():
        yield "## Fitted on one data set or LLM, used on another\n"
        yield file.read_text()
