"""What gates, rerankers and thresholds are worth on given questions: comparison, boundary, traffic, reranking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.evaluation.boundary.boundary import Interval, RowCounts, change
    from knowgate.evaluation.boundary.facts import INDICATORS
    from knowgate.evaluation.boundary.run_report import RunReport, read_runs, run_report_json
    from knowgate.evaluation.boundary.saving import Point, Saving
    from knowgate.evaluation.boundary.slices import NOT_GIVEN, Slice, summarise
    from knowgate.evaluation.compare_gates import evaluate
    from knowgate.evaluation.comparison.evaluation import Evaluation, SliceTable, evaluation_json
    from knowgate.evaluation.comparison.gate_results import RATES, GateResult
    from knowgate.evaluation.comparison.overview import main_sheet
    from knowgate.evaluation.dhicl_tables import EXAMPLE_COUNTS, WORD_PAIRS, Variants, history_tables
    from knowgate.evaluation.latency import latency_sheet, time_gates
    from knowgate.evaluation.reranking.answers import Answering
    from knowgate.evaluation.reranking.rankers import compare_rankers, markdown, summary
    from knowgate.evaluation.self_assessment import (
        Assessment,
        assess_direct,
        assess_freely,
        assess_gate,
        assess_with_history,
    )
    from knowgate.evaluation.sweeps import sweep_betas, sweep_plug_in, sweep_thresholds, sweep_transfer, sweep_variants
    from knowgate.evaluation.traffic.log import Log, read_log, read_run, shown_bad
    from knowgate.evaluation.traffic.replay import Prices, ThresholdLine, Traffic, TrafficSaving, replay
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Answering",
    "Assessment",
    "EXAMPLE_COUNTS",
    "Evaluation",
    "GateResult",
    "INDICATORS",
    "Interval",
    "Log",
    "NOT_GIVEN",
    "Point",
    "Prices",
    "RATES",
    "RowCounts",
    "RunReport",
    "Saving",
    "Slice",
    "SliceTable",
    "ThresholdLine",
    "Traffic",
    "TrafficSaving",
    "Variants",
    "WORD_PAIRS",
    "assess_direct",
    "assess_freely",
    "assess_gate",
    "assess_with_history",
    "change",
    "compare_rankers",
    "evaluate",
    "evaluation_json",
    "history_tables",
    "latency_sheet",
    "main_sheet",
    "markdown",
    "read_log",
    "read_run",
    "read_runs",
    "replay",
    "run_report_json",
    "shown_bad",
    "summarise",
    "summary",
    "sweep_betas",
    "sweep_plug_in",
    "sweep_thresholds",
    "sweep_transfer",
    "sweep_variants",
    "time_gates",
]
