"""`knowgate report`: show what the LLM of label runs knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import create_wide_console, inform, print_json, print_text
from knowgate.cli.options import path_argument, path_option
from knowgate.core.files import write_text
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput
from knowgate.evaluation.boundary import RunReport, read_run_reports, run_report_to_dict
from knowgate.evaluation.report.boundary_page import describe_boundary, write_boundary_page
from knowgate.evaluation.report.boundary_tables import build_boundary_tables
from knowgate.evaluation.report.report_folder import PAGE_FILE
from knowgate.evaluation.report.terminal import render_tables
from knowgate.training import topics


def report(
    runs: Annotated[list[Path], path_argument("RUN...", "Label runs: folders made by `knowgate label`.")],
    options: topics.TopicOptions,
    out: Annotated[
        Path | None, path_option("FILE", "HTML page to write. Default: report.html in the first RUN.")
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Whether to write the HTML page.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Show which questions the LLM answers from memory, and where passages help or harm.

    Prints tables with the label runs side by side. Also writes an HTML page.
    """
    reports = read_run_reports(runs)
    empty = [run.path for run in reports if not run.boundary.counts.rows]
    if empty:
        raise BadInput(f"the label run '{empty[0]}' has no answers yet. Continue it with `knowgate label`.")
    if as_json:
        print_json({"runs": [run_report_to_dict(run) for run in reports]})
    else:
        _print_reports(reports)
    if options.topics or options.topic_rules:
        _print_topics(runs, options)
    if html:
        file = out or runs[0] / PAGE_FILE
        write_boundary_page(reports, file)
        inform(f"Page: {file.resolve()}")
    if not as_json:
        labels = " ".join(f"--labels {run.path}" for run in reports)
        inform(f"Find out whether a gate is worth using: knowgate eval {labels} --out DIR")


def _print_reports(reports: Sequence[RunReport]) -> None:
    """Print tables of all label runs side by side, then a paragraph about each run."""
    create_wide_console().print(render_tables(build_boundary_tables(reports)))
    for run in reports:
        print_text(" ".join(describe_boundary(run)))


def _print_topics(runs: Sequence[Path], options: topics.TopicOptions) -> None:
    """Print the table of topics and the proposed rules. The rules can also be written to a file."""
    results = topics.measure_topics(load_label_table(runs, layers=()), options.topics or topics.AUTO_TOPICS)
    create_wide_console().print(render_tables([topics.build_topic_table(results)]))
    rules = topics.propose_rules(results)
    print_text(topics.describe_rules(rules) or "No rule follows from these topics with certainty.")
    if options.topic_rules is not None and rules:
        write_text(options.topic_rules, "\n".join(rule.to_toml() for rule in rules))
        inform(f"{len(rules)} rules are in {options.topic_rules}. Read them, then use: --rules {options.topic_rules}")
