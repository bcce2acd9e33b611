"""What was measured, for people: tables, charts, pages. One folder per report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.report.boundary.page import write_page
    from knowgate.report.boundary.terminal import tables
    from knowgate.report.boundary.verdict import boundary_words
    from knowgate.report.comparison.page import write_eval_page
    from knowgate.report.comparison.sheets import all_sheets
    from knowgate.report.comparison.verdict import Verdict, verdict
    from knowgate.report.comparison.words import points_plain
    from knowgate.report.contrast.page import write_contrast_page
    from knowgate.report.contrast.sheets import basis, differences, headline, left_out, short
    from knowgate.report.reranking.page import write_rerank_page
    from knowgate.report.reranking.verdict import rerank_verdict
    from knowgate.report.terminal import render
    from knowgate.report.write import check_report_folder, summary_json, write_report
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Verdict",
    "all_sheets",
    "basis",
    "boundary_words",
    "check_report_folder",
    "differences",
    "headline",
    "left_out",
    "points_plain",
    "render",
    "rerank_verdict",
    "short",
    "summary_json",
    "tables",
    "verdict",
    "write_contrast_page",
    "write_eval_page",
    "write_page",
    "write_report",
    "write_rerank_page",
]
