"""`knowgate index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import parse_path
from knowgate.cli.progress import show_progress
from knowgate.retrieval.index import IndexOptions, IndexReport, build_index

SOURCE_HELP = "Folder (txt, md, html, pdf) or JSONL {id, title, text}."
EMBEDDER_HELP = "Embedding for dense and hybrid: minilm (default), mpnet, m3e, a hub name or folder, openai:MODEL@URL."


def index(
    source: Annotated[Path, typer.Argument(parser=parse_path, metavar="SOURCE", help=SOURCE_HELP)],
    out: Annotated[
        Path, typer.Option(parser=parse_path, metavar="DIR", help="Index folder; an existing index is updated.")
    ],
    options: IndexOptions,
    embedder: Annotated[str | None, typer.Option(help=EMBEDDER_HELP)] = None,
) -> None:
    """Build a retrieval index, or update one: only new and changed documents are embedded again."""
    with show_progress("indexing", "passages", STDERR_CONSOLE) as show:

        def report_progress(stage: str, done: int, total: int) -> None:
            show(done, total, stage=stage, unit="documents" if stage == "read" else "passages")

        report = build_index(source, out, embedder=embedder, progress=report_progress, options=options)
    STDERR_CONSOLE.print(format_index_report(report, out))
    STDERR_CONSOLE.print(f"Ask: knowgate ask --index {out} -i")


def format_index_report(report: IndexReport, out: Path) -> str:
    """Describe in two or three sentences what the index holds and what changed."""
    size = f"{report.documents} documents, {report.passages} passages in {out}."
    skipped = "".join(f" Skipped {count} {suffix} files." for suffix, count in sorted(report.skipped.items()))
    skipped += f" {report.summarize_problems()}" if report.problems else ""
    if not report.written:
        return f"Nothing had changed: {size}{skipped}"
    changes = f"{report.added} added, {report.changed} changed, {report.removed} removed, {report.unchanged} unchanged."
    return f"{size} {changes}{skipped}"
