"""`knowgate index`: build or update a retrieval index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import inform
from knowgate.cli.options import path_argument, path_option
from knowgate.cli.progress import show_progress
from knowgate.retrieval.index import IndexOptions, IndexReport, build_index

SOURCE_HELP = "Documents to index: a folder of txt, md, html and pdf files, or a JSONL file with id, title and text."
EMBEDDER_HELP = "Embedding model of dense and hybrid: minilm (default), mpnet, m3e, NAME_OR_DIR, or openai:MODEL@URL."


def index(
    source: Annotated[Path, path_argument("SOURCE", SOURCE_HELP)],
    out: Annotated[Path, path_option("DIR", "Folder of the index; an existing index is updated.")],
    options: IndexOptions,
    embedder: Annotated[str | None, typer.Option(help=EMBEDDER_HELP)] = None,
) -> None:
    """Build a retrieval index, or update an existing one.

    An update embeds only new and changed documents.
    """
    with show_progress("indexing", "passages") as show:

        def report_progress(stage: str, done: int, total: int) -> None:
            show(done, total, stage=stage, unit="documents" if stage == "read" else "passages")

        report = build_index(source, out, embedder=embedder, progress=report_progress, options=options)
    inform(format_index_report(report, out))
    inform(f"Ask: knowgate ask --index {out} -i")


def format_index_report(report: IndexReport, out: Path) -> str:
    """Describe what the index contains, what changed, and which files were skipped."""
    size = f"{report.documents} documents, {report.passages} passages in {out}."
    skipped = "".join(f" Skipped {count} {suffix} files." for suffix, count in sorted(report.skipped.items()))
    skipped += f" {report.summarize_problems()}" if report.problems else ""
    if not report.written:
        return f"The documents have not changed: {size}{skipped}"
    changes = f"{report.added} added, {report.changed} changed, {report.removed} removed, {report.unchanged} unchanged."
    return f"{size} {changes}{skipped}"
