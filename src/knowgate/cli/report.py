"""`knowgate report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS, print_json, say_page
from knowgate.cli.paths import path
from knowgate.cli.tables import print_text, wide_console
from knowgate.errors import BadInput
from knowgate.evaluation import read_runs, run_report_json
from knowgate.report import boundary_words, tables, write_page


def report(
    runs: Annotated[list[Path], typer.Argument(parser=path, metavar="RUN...", help="Folders of `knowgate label`.")],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", show_default="./report.html", help="The page: one HTML file."),
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write the page.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the tables.")] = False,
) -> None:
    """Show the knowledge boundary of one or more label runs, side by side."""
    found = read_runs(runs)
    for run in found:
        if not run.boundary.counts.rows:
            raise BadInput(f"'{run.path}' has no rows yet. Run its knowgate label again: it goes on where it was.")
    if as_json:
        print_json({"runs": [run_report_json(run) for run in found]})
    else:
        wide_console().print(tables(found))
        for run in found:
            print_text(" ".join(boundary_words(run)))
    if html:
        file = out or Path("report.html")
        write_page(found, file)
        say_page(file)
    if not as_json:
        named = " ".join(f"--labels {run.path}" for run in found)
        WORDS.print(f"Would a gate pay? knowgate eval {named} --out DIR")
