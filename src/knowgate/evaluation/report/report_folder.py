"""Reports as files: an evaluation, or the knowledge boundary of label runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knowgate.core.display import render_markdown_tables
from knowgate.core.files import check_output_folder, write_json, write_text
from knowgate.core.options import Share, option, with_options
from knowgate.core.validation import expand_path
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.evaluation.boundary import RunReport, read_run_reports, run_report_to_dict
from knowgate.evaluation.cost import CostAssumptions
from knowgate.evaluation.evaluation_summary import DECISIONS_FILE, SUMMARY_FILE, decisions_to_dict, evaluation_to_dict
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.recommendation import MAX_LOSS, recommend, recommendation_to_dict
from knowgate.evaluation.report.boundary_page import write_boundary_page
from knowgate.evaluation.report.boundary_tables import build_boundary_tables
from knowgate.evaluation.report.evaluation_page import write_evaluation_page
from knowgate.evaluation.report.evaluation_tables import build_evaluation_tables
from knowgate.evaluation.report.evaluation_verdict import build_verdict

PAGE_FILE, TABLES_FILE = "report.html", "table.md"
RUNS_FOLDER = "runs"  # where an evaluation stores the questions it answered


class ReportOptions(CostAssumptions):
    """Options of `write_report`."""

    html: bool = option(True, "Whether to write the HTML page.")
    max_loss: Share = option(
        MAX_LOSS,
        "Largest net loss of a recommended gate: the share of right answers that it loses, minus the share that it gains.",
    )


@with_options(ReportOptions)
def write_report(content: Evaluation | RunsLike, out: str | Path, *, options: ReportOptions) -> Path:
    """Write report.html, summary.json and table.md.

    Args:
        content: An evaluation, or label runs whose knowledge boundary is reported.
        out: Folder to write to.
        options: Options as one object. Each option can also be given as a keyword.

    Returns:
        The folder.

    Raises:
        BadSetting: The folder holds other files.

    Example:
        >>> write_report(evaluate("auto", "runs/test"), "report")  # doctest: +SKIP
    """
    folder = expand_path(out)
    check_report_folder(folder)
    if isinstance(content, Evaluation):
        _write_evaluation_report(content, folder, options)
    else:
        _write_boundary_report(read_run_reports(resolve_run_paths(content)), folder, options)
    return folder


def _write_evaluation_report(evaluation: Evaluation, folder: Path, options: ReportOptions) -> None:
    """Write the files of a report on evaluated gates."""
    write_json(folder / SUMMARY_FILE, build_summary(evaluation, options))
    write_text(folder / TABLES_FILE, render_markdown_tables(list(build_evaluation_tables(evaluation))))
    write_json(folder / DECISIONS_FILE, decisions_to_dict(evaluation, recommend(evaluation, options.max_loss)))
    if options.html:
        write_evaluation_page(evaluation, folder / PAGE_FILE, options, options.max_loss)


def _write_boundary_report(runs: Sequence[RunReport], folder: Path, options: ReportOptions) -> None:
    """Write the files of a report on what LLMs know."""
    write_json(folder / SUMMARY_FILE, {"runs": [run_report_to_dict(run) for run in runs]})
    write_text(folder / TABLES_FILE, render_markdown_tables(list(build_boundary_tables(runs))))
    if options.html:
        write_boundary_page(runs, folder / PAGE_FILE)


def build_summary(evaluation: Evaluation, options: ReportOptions) -> dict[str, Any]:
    """Build the content of summary.json: the recommendation, what it saves, and all numbers of an evaluation."""
    verdict = build_verdict(evaluation, options, options.max_loss)
    return {
        "recommendation": {**recommendation_to_dict(verdict.recommendation), "verdict": verdict.label},
        "savings": verdict.costs.to_dict() if verdict.recommendation.is_positive else None,
        **evaluation_to_dict(evaluation),
    }


def check_report_folder(folder: Path) -> None:
    """Raise BadSetting if a folder holds other files besides a report's."""
    files = [PAGE_FILE, SUMMARY_FILE, TABLES_FILE, DECISIONS_FILE, RUNS_FOLDER]
    check_output_folder(folder, files, "a report's")
