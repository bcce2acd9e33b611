"""`write_report`: an evaluation, or label runs, as files for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knowgate.core.display import TextTable, render_markdown_tables
from knowgate.core.files import check_output_folder, write_json, write_text
from knowgate.core.validation import expand_path
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.evaluation.boundary import read_run_reports, run_report_to_dict
from knowgate.evaluation.cost import CostAssumptions
from knowgate.evaluation.evaluation_summary import DECISIONS_FILE, SUMMARY_FILE, decisions_to_dict
from knowgate.evaluation.gate_comparison import Evaluation, evaluation_to_dict
from knowgate.evaluation.recommendation import MAX_LOSS, recommend, recommendation_to_dict
from knowgate.evaluation.report.boundary_page import write_boundary_page
from knowgate.evaluation.report.boundary_tables import build_boundary_tables
from knowgate.evaluation.report.evaluation_page import write_evaluation_page
from knowgate.evaluation.report.evaluation_tables import build_evaluation_tables

PAGE_FILE, TABLES_FILE = "report.html", "table.md"
RUNS_FOLDER = "runs"  # where an evaluation keeps the questions it has answered


def write_report(
    about: Evaluation | RunsLike,
    out: str | Path,
    *,
    html: bool = True,
    assumed: CostAssumptions | None = None,
    max_loss: float = MAX_LOSS,
) -> Path:
    """Gates compared (an evaluation), or the knowledge boundary of label runs, as report.html, summary.json, table.md.

    out: the folder they are written to. html: False leaves the page out. Of an evaluation: assumed, the prices that
    savings are told at; max_loss, the share of the answers that fewer searches may cost. Gives back the folder.
    """
    folder = expand_path(out)
    check_report_folder(folder)
    if isinstance(about, Evaluation):
        _write(folder, build_summary(about, max_loss), list(build_evaluation_tables(about)))
        write_json(folder / DECISIONS_FILE, decisions_to_dict(about, recommend(about, max_loss)))
        if html:
            write_evaluation_page(about, folder / PAGE_FILE, assumed=assumed, max_loss=max_loss)
        return folder
    runs = read_run_reports(resolve_run_paths(about))
    _write(folder, {"runs": [run_report_to_dict(run) for run in runs]}, list(build_boundary_tables(runs)))
    if html:
        write_boundary_page(runs, folder / PAGE_FILE)
    return folder


def build_summary(evaluation: Evaluation, max_loss: float = MAX_LOSS) -> dict[str, Any]:
    """Every number of the report, the recommendation first."""
    return {"recommendation": recommendation_to_dict(recommend(evaluation, max_loss)), **evaluation_to_dict(evaluation)}


def check_report_folder(folder: Path) -> None:
    """Refuse a folder of other things, before there is a report to write."""
    check_output_folder(folder, [PAGE_FILE, SUMMARY_FILE, TABLES_FILE, DECISIONS_FILE, RUNS_FOLDER], "a report's")


def _write(folder: Path, summary: dict[str, Any], sheets: list[TextTable]) -> None:
    write_json(folder / SUMMARY_FILE, summary)
    write_text(folder / TABLES_FILE, render_markdown_tables(sheets))
