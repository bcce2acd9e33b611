"""`knowgate index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import RetrieverOption, parse_path
from knowgate.cli.progress import show_progress
from knowgate.retrieval.index import IndexReport, build_index

STAGE_UNITS = {"read": "documents"}  # the other stages go through passages


def index(
    source: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="SOURCE", help="Folder (txt, md, html, pdf) or JSONL {id, title, text}."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_path, metavar="DIR", help="Where the index goes. An index that is there is brought up to date."
        ),
    ],
    retriever: RetrieverOption = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="Embedding for dense and hybrid: minilm (default), mpnet, m3e, a hub name or folder, openai:MODEL@URL."
        ),
    ] = None,
    max_words: Annotated[int, typer.Option(help="Longest passage in words.")] = 120,
) -> None:
    """Build a retrieval index, or update one: only new and changed documents are embedded again."""
    with show_progress("indexing", "passages", STDERR_CONSOLE) as show:

        def watch(stage: str, done: int, total: int) -> None:
            show(done, total, stage=stage, unit=STAGE_UNITS.get(stage, "passages"))

        kind = retriever or "bm25"
        report = build_index(source, out, kind=kind, embedder=embedder, max_words=max_words, progress=watch)
    STDERR_CONSOLE.print(format_index_report(report, out))
    STDERR_CONSOLE.print(f"Ask: knowgate ask --index {out} -i")


def format_index_report(report: IndexReport, out: Path) -> str:
    """What happened, in a sentence or two."""
    size = f"{report.documents} documents, {report.passages} passages in {out}."
    skipped = "".join(f" Skipped {count} {suffix} files." for suffix, count in sorted(report.skipped.items()))
    skipped += f" {report.missed}" if report.problems else ""
    if not report.written:
        return f"Nothing had changed: {size}{skipped}"
    changes = f"{report.added} added, {report.changed} changed, {report.removed} removed, {report.unchanged} unchanged."
    return f"{size} {changes}{skipped}"
