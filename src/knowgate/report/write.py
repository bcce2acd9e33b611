"""`write_report`: an evaluation, or label runs, as files for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knowgate.display import Sheet, markdown_tables
from knowgate.doors import user_path
from knowgate.evaluation import (
    DECISIONS,
    MAX_LOSS,
    SUMMARY,
    Assumed,
    Evaluation,
    decisions_json,
    evaluation_json,
    read_runs,
    recommend,
    recommendation_json,
    run_report_json,
)
from knowgate.files import check_own, write_json, write_text
from knowgate.report.boundary.page import write_page
from knowgate.report.boundary.terminal import every_sheet
from knowgate.report.comparison.page import write_eval_page
from knowgate.report.comparison.sheets import all_sheets
from knowgate.runs import Runs, run_paths

PAGE, TABLES = "report.html", "table.md"
RUNS = "runs"  # where an evaluation keeps the questions it has answered


def write_report(
    about: Evaluation | Runs,
    out: str | Path,
    *,
    html: bool = True,
    assumed: Assumed | None = None,
    max_loss: float = MAX_LOSS,
) -> Path:
    """Gates compared (an evaluation), or the knowledge boundary of label runs, as report.html, summary.json, table.md.

    out: the folder they are written to. html: False leaves the page out. Of an evaluation: assumed, the prices that
    savings are told at; max_loss, the share of the answers that fewer searches may cost. Gives back the folder.
    """
    folder = user_path(out)
    check_report_folder(folder)
    if isinstance(about, Evaluation):
        _write(folder, summary_json(about, max_loss), list(all_sheets(about)))
        write_json(folder / DECISIONS, decisions_json(about, recommend(about, max_loss)))
        if html:
            write_eval_page(about, folder / PAGE, assumed=assumed, max_loss=max_loss)
        return folder
    runs = read_runs(run_paths(about))
    _write(folder, {"runs": [run_report_json(run) for run in runs]}, list(every_sheet(runs)))
    if html:
        write_page(runs, folder / PAGE)
    return folder


def summary_json(evaluation: Evaluation, max_loss: float = MAX_LOSS) -> dict[str, Any]:
    """Every number of the report, the recommendation first."""
    return {"recommendation": recommendation_json(recommend(evaluation, max_loss)), **evaluation_json(evaluation)}


def check_report_folder(folder: Path) -> None:
    """Refuse a folder of other things, before there is a report to write."""
    check_own(folder, [PAGE, SUMMARY, TABLES, DECISIONS, RUNS], "a report's")


def _write(folder: Path, summary: dict[str, Any], sheets: list[Sheet]) -> None:
    write_json(folder / SUMMARY, summary)
    write_text(folder / TABLES, markdown_tables(sheets))
