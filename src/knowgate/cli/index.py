"""`knowgate index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from knowgate.cli.paths import path
from knowgate.retrieval import IndexReport, build_index

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def index(
    source: Annotated[
        Path,
        typer.Argument(parser=path, metavar="SOURCE", help="Folder (txt, md, html, pdf) or JSONL {id, title, text}."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=path, metavar="DIR", help="Where the index goes. An index that is there is brought up to date."
        ),
    ],
    kind: Annotated[str, typer.Option(help="bm25, dense or hybrid.")] = "bm25",
    embedder: Annotated[
        str | None,
        typer.Option(help="Embedding for dense and hybrid: minilm (default), a hub name or folder."),
    ] = None,
    max_words: Annotated[int, typer.Option(help="Longest passage in words.")] = 120,
) -> None:
    """Build a retrieval index, or update one: only new and changed documents are embedded again."""
    console = Console(stderr=True)
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        report = build_index(source, out, kind=kind, embedder=embedder, max_words=max_words, progress=show)
    typer.echo(summary(report, out), err=True)


def summary(report: IndexReport, out: Path) -> str:
    """What happened, in a sentence or two."""
    size = f"{report.documents} documents, {report.passages} passages in {out}."
    skipped = "".join(f" Skipped {count} {suffix} files." for suffix, count in sorted(report.skipped.items()))
    if not report.written:
        return f"Nothing had changed: {size}{skipped}"
    changes = f"{report.added} added, {report.changed} changed, {report.removed} removed, {report.unchanged} unchanged."
    return f"{size} {changes}{skipped}"
