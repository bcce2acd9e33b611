"""`knowgate compare`: compare two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import inform, print_json, print_page_location, print_tables, print_text
from knowgate.cli.options import GatesOption, path_argument, split_gate_specs
from knowgate.core.options import Options, Share, WholeNumber, option
from knowgate.evaluation.evaluation_diff import diff_evaluations, diff_to_dict
from knowgate.evaluation.evaluation_summary import load_evaluation_summary
from knowgate.evaluation.report import diff_report
from knowgate.evaluation.report.evaluation_verdict import format_point_count

EXIT_WORSE = 3  # exit status of --fail-if-worse


class CompareOptions(Options):
    """Options of `knowgate compare`."""

    gate: list[str] = option(
        [],
        "Gate whose results in A and B are compared, alone and with its arbiter; may be repeated. Default: never, "
        "always, the recommended gate of each side, and all gates with an arbiter.",
    )
    fail_if_worse: Share | None = option(
        None,
        "Exit with status 3 if the accuracy of a compared gate fell by more than this share, and the 95 % interval "
        "of the difference is below 0.",
    )
    out: Path | None = option(None, "HTML file to write a page to. Default: no page.", metavar="FILE")
    html: bool = option(True, "Deprecated: without --out, no page is written anyway.")
    resamples: WholeNumber = option(2_000, "Number of bootstrap resamples for the intervals.")


def compare(
    first: Annotated[Path, path_argument("A", "Evaluation folder written by `knowgate eval --out`, or a label run.")],
    second: Annotated[Path, path_argument("B", "Second evaluation folder or label run.")],
    options: CompareOptions,
    gates: GatesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare two evaluations, such as before and after a change, or of two LLMs or two indexes.

    Prints the differences B - A with intervals. They are paired if A and B share enough questions. If A or B
    is a label run, it is evaluated first with --gates.

    Example: knowgate compare report-main report-branch --fail-if-worse 0.01
    """
    specs = split_gate_specs(gates, (first, second))
    before, after = (load_evaluation_summary(path, specs, options.resamples) for path in (first, second))
    diff = diff_evaluations(before, after, options.gate, options.resamples)
    worse = [] if options.fail_if_worse is None else diff.find_worse(options.fail_if_worse)
    if as_json:
        print_json({**diff_to_dict(diff), "worse": [each.gate for each in worse]})
    else:
        print_tables([diff_report.build_diff_table(diff, diff_report.select_gates(diff))])
        verdict = diff_report.build_diff_verdict(diff)
        notes = (diff_report.describe_pairing(diff), diff_report.describe_uncompared_gates(diff))
        print_text(" ".join(filter(None, [verdict.headline, verdict.details, *notes])))
    if options.out is not None and options.html:
        diff_report.write_diff_page(diff, options.out)
        print_page_location(options.out)
    if worse:
        names = ", ".join(f"'{each.gate}'" for each in worse)
        inform(f"Accuracy fell by more than {format_point_count(options.fail_if_worse or 0.0)}: {names}.", style="red")
        raise typer.Exit(EXIT_WORSE)
