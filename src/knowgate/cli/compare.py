"""`knowgate compare`: compare two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_page_location, print_tables, print_text
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.options import GatesOption, parse_path
from knowgate.core.options import Options, Share, WholeNumber
from knowgate.evaluation.evaluation_diff import diff_evaluations, diff_to_dict
from knowgate.evaluation.evaluation_summary import load_evaluation_summary
from knowgate.evaluation.report import diff_report
from knowgate.evaluation.report.evaluation_verdict import format_point_count

EXIT_WORSE = 3


class CompareOptions(Options):
    """Options of `knowgate compare`."""

    gate: list[str] = Field(
        default_factory=list,
        description="Gate that counts, with its arbiter; may be repeated. Default: never, always, what each "
        "recommends, and all with an arbiter.",
    )
    fail_if_worse: Share | None = Field(
        default=None,
        description="Exit with 3 if the accuracy of a gate that counts certainly fell by more than this share.",
    )
    out: Path = Field(
        default=Path("compare.html"), description="The page: one HTML file.", json_schema_extra={"metavar": "FILE"}
    )
    html: bool = Field(default=True, description="Write the page.")
    resamples: WholeNumber = Field(default=2_000, description="Bootstrap resamples for the intervals.")


def compare(
    first: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="A", help="Folder of `knowgate eval --out`, or a label run.")
    ],
    second: Annotated[Path, typer.Argument(parser=parse_path, metavar="B", help="The same, to be compared with A.")],
    options: CompareOptions,
    gates: GatesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
) -> None:
    """Compare two evaluations (before and after, two LLMs, two indexes): differences with intervals, one page.

    Differences are paired if A and B share their questions. Gates followed by an arbiter (eval --arbiter) are
    compared and count as well. Label runs are evaluated first, with --gates.

    Example: knowgate compare report-main report-branch --fail-if-worse 0.01
    """
    specs = split_gate_specs(gates, (first, second))
    before, after = (load_evaluation_summary(path, specs, options.resamples) for path in (first, second))
    diff = diff_evaluations(before, after, options.gate, options.resamples)
    worse = [] if options.fail_if_worse is None else diff.find_worse(options.fail_if_worse)
    if as_json:
        print_json({**diff_to_dict(diff), "worse": [each.gate for each in worse]})
    else:
        print_tables([diff_report.build_short_diff_table(diff)])
        verdict = diff_report.build_diff_verdict(diff)
        notes = (diff_report.describe_pairing(diff), diff_report.describe_uncompared_gates(diff))
        print_text(" ".join(filter(None, [verdict.headline, verdict.details, *notes])))
    if options.html:
        diff_report.write_diff_page(diff, options.out)
        print_page_location(options.out)
    if worse:
        names = ", ".join(f"'{each.gate}'" for each in worse)
        STDERR_CONSOLE.print(
            f"Worse by more than {format_point_count(options.fail_if_worse or 0.0)}: {names}.", style="red"
        )
        raise typer.Exit(EXIT_WORSE)
