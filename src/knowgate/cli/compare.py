"""`knowgate compare`: two evaluations held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS, print_json, say_page
from knowgate.cli.gate_specs import split_specs
from knowgate.cli.options import Gates
from knowgate.cli.paths import path
from knowgate.cli.tables import print_sheets, print_text
from knowgate.evaluation import contrast_json, hold_against, read_side
from knowgate.report import basis, headline, left_out, points_plain, short, write_contrast_page

WORSE = 3  # exit code


def compare(
    first: Annotated[
        Path, typer.Argument(parser=path, metavar="A", help="Folder of `knowgate eval --out`, or a label run.")
    ],
    second: Annotated[Path, typer.Argument(parser=path, metavar="B", help="The same, to be held against A.")],
    gate: Annotated[
        list[str] | None,
        typer.Option(
            help="Gate that counts, with its arbiter; may be repeated. [default: never, always, what each recommends, "
            "all with an arbiter]"
        ),
    ] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with 3 where a gate that counts is less accurate on B by more than this share, for certain.",
        ),
    ] = None,
    gates: Gates = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", show_default="compare.html", help="The page: one HTML file."),
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write the page.")] = True,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples for the intervals.")] = 2_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
) -> None:
    """Compare two evaluations (before and after, two LLMs, two indexes): differences with intervals, one page.

    Differences are paired where A and B share their questions. Gates with an arbiter behind them (eval --arbiter) are
    compared and count as well. Label runs are evaluated first, with --gates.

    Example: knowgate compare report-main report-branch --fail-if-worse 0.01
    """
    specs = split_specs(gates, (first, second))
    before, after = (read_side(one, specs, resamples) for one in (first, second))
    found = hold_against(before, after, gate or [], resamples)
    worse = found.worse_by(fail_if_worse) if fail_if_worse is not None else []
    if as_json:
        print_json({**contrast_json(found), "worse": [one.gate for one in worse]})
    else:
        print_sheets([short(found)])
        head = headline(found)
        print_text(" ".join(filter(None, [head.said, head.told, basis(found), left_out(found)])))
    if html:
        file = out or Path("compare.html")
        write_contrast_page(found, file)
        say_page(file)
    if worse:
        named = ", ".join(f"'{one.gate}'" for one in worse)
        WORDS.print(f"Worse by more than {points_plain(fail_if_worse or 0.0)}: {named}.", style="red")
        raise typer.Exit(WORSE)
