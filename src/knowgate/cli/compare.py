"""`knowgate compare`: two evaluations held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_page_location, print_tables, print_text
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.options import GatesOption, parse_path
from knowgate.evaluation.evaluation_diff import diff_evaluations, diff_to_dict
from knowgate.evaluation.evaluation_summary import load_evaluation_summary
from knowgate.evaluation.report.diff_report import (
    build_diff_verdict,
    build_short_diff_table,
    describe_pairing,
    describe_uncompared_gates,
    write_diff_page,
)
from knowgate.evaluation.report.evaluation_verdict import format_point_count

EXIT_WORSE = 3  # exit code


def compare(
    first: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="A", help="Folder of `knowgate eval --out`, or a label run.")
    ],
    second: Annotated[Path, typer.Argument(parser=parse_path, metavar="B", help="The same, to be held against A.")],
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
    gates: GatesOption = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="FILE", show_default="compare.html", help="The page: one HTML file."),
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
    specs = split_gate_specs(gates, (first, second))
    before, after = (load_evaluation_summary(one, specs, resamples) for one in (first, second))
    found = diff_evaluations(before, after, gate or [], resamples)
    worse = found.worse_by(fail_if_worse) if fail_if_worse is not None else []
    if as_json:
        print_json({**diff_to_dict(found), "worse": [one.gate for one in worse]})
    else:
        print_tables([build_short_diff_table(found)])
        head = build_diff_verdict(found)
        print_text(
            " ".join(filter(None, [head.said, head.told, describe_pairing(found), describe_uncompared_gates(found)]))
        )
    if html:
        file = out or Path("compare.html")
        write_diff_page(found, file)
        print_page_location(file)
    if worse:
        named = ", ".join(f"'{one.gate}'" for one in worse)
        STDERR_CONSOLE.print(f"Worse by more than {format_point_count(fail_if_worse or 0.0)}: {named}.", style="red")
        raise typer.Exit(EXIT_WORSE)
