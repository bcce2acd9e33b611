"""What gates, rerankers and thresholds are worth on given questions: comparison, boundary, traffic, reranking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.evaluation.actions import action_sheet
    from knowgate.evaluation.beta_table import beta_sheets
    from knowgate.evaluation.boundary.boundary import Interval, RowCounts, change
    from knowgate.evaluation.boundary.facts import INDICATORS
    from knowgate.evaluation.boundary.run_report import RunReport, read_runs, run_report_json
    from knowgate.evaluation.boundary.saving import Point, Saving
    from knowgate.evaluation.boundary.slices import NOT_GIVEN, Slice, summarise
    from knowgate.evaluation.cascade import CASCADE_RATES, cascade_sheet
    from knowgate.evaluation.compare_gates import evaluate
    from knowgate.evaluation.comparison.evaluation import Evaluation, SliceTable, evaluation_json
    from knowgate.evaluation.comparison.frontier import Frontier
    from knowgate.evaluation.comparison.gate_results import RATES, GateResult, majority_share
    from knowgate.evaluation.comparison.overview import main_sheet
    from knowgate.evaluation.comparison.promised import Promised
    from knowgate.evaluation.comparison.recommend import (
        CERTAIN,
        FEWEST,
        MAX_LOSS,
        ROUNDS,
        WORTH,
        Recommendation,
        recommend,
        recommendation_json,
    )
    from knowgate.evaluation.comparison.spending import (
        PER,
        PRICE_SEARCH,
        PRICE_TOKEN,
        SEARCH_SECONDS,
        Assumed,
        Spending,
        spend_always,
        spend_gated,
        spend_never,
    )
    from knowgate.evaluation.contrast.contrast import Change, Contrast, GateContrast, contrast_json, hold_against
    from knowgate.evaluation.contrast.side import DECISIONS, SUMMARY, decisions_json, read_side
    from knowgate.evaluation.dhicl_tables import EXAMPLE_COUNTS, WORD_PAIRS, Variants, history_tables
    from knowgate.evaluation.ik_ablations import sweep_ik
    from knowgate.evaluation.latency import latency_sheet, time_gates
    from knowgate.evaluation.reranking.answers import Answering
    from knowgate.evaluation.reranking.compare import (
        HeldOut,
        RerankComparison,
        compare_rerankers,
        held_out,
        is_reranker,
    )
    from knowgate.evaluation.reranking.controls import PassageMeans, ShortestFirst
    from knowgate.evaluation.reranking.kept_scores import KeptScores
    from knowgate.evaluation.reranking.rankers import BARE, ORACLE, RETRIEVER, Measured
    from knowgate.evaluation.reranking.tables import prediction_lines, rerank_json, rerank_sheets
    from knowgate.evaluation.second_look import second_sheet
    from knowgate.evaluation.self_assessment import (
        Assessment,
        assess_direct,
        assess_freely,
        assess_gate,
        assess_with_history,
    )
    from knowgate.evaluation.sweeps import sweep_betas, sweep_plug_in, sweep_thresholds, sweep_transfer, sweep_variants
    from knowgate.evaluation.traffic.costing import (
        PER_BILL,
        Bill,
        Costing,
        PriceTable,
        bill_traffic,
        break_even_price,
        read_prices,
    )
    from knowgate.evaluation.traffic.log import Log, agrees, read_log, read_run, shown_bad
    from knowgate.evaluation.traffic.replay import Prices, ThresholdLine, Traffic, TrafficSaving, replay
    from knowgate.evaluation.traffic.served import is_served, read_served, served_questions
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Answering",
    "Assessment",
    "Assumed",
    "BARE",
    "Bill",
    "CASCADE_RATES",
    "CERTAIN",
    "Change",
    "Contrast",
    "Costing",
    "DECISIONS",
    "EXAMPLE_COUNTS",
    "Evaluation",
    "FEWEST",
    "Frontier",
    "GateContrast",
    "GateResult",
    "HeldOut",
    "INDICATORS",
    "Interval",
    "KeptScores",
    "Log",
    "MAX_LOSS",
    "Measured",
    "NOT_GIVEN",
    "ORACLE",
    "PER",
    "PER_BILL",
    "PRICE_SEARCH",
    "PRICE_TOKEN",
    "PassageMeans",
    "Point",
    "PriceTable",
    "Prices",
    "Promised",
    "RATES",
    "RETRIEVER",
    "ROUNDS",
    "Recommendation",
    "RerankComparison",
    "RowCounts",
    "RunReport",
    "SEARCH_SECONDS",
    "SUMMARY",
    "Saving",
    "ShortestFirst",
    "Slice",
    "SliceTable",
    "Spending",
    "ThresholdLine",
    "Traffic",
    "TrafficSaving",
    "Variants",
    "WORD_PAIRS",
    "WORTH",
    "action_sheet",
    "agrees",
    "assess_direct",
    "assess_freely",
    "assess_gate",
    "assess_with_history",
    "beta_sheets",
    "bill_traffic",
    "break_even_price",
    "cascade_sheet",
    "change",
    "compare_rerankers",
    "contrast_json",
    "decisions_json",
    "evaluate",
    "evaluation_json",
    "held_out",
    "history_tables",
    "hold_against",
    "is_reranker",
    "is_served",
    "latency_sheet",
    "main_sheet",
    "majority_share",
    "prediction_lines",
    "read_log",
    "read_prices",
    "read_run",
    "read_runs",
    "read_served",
    "read_side",
    "recommend",
    "recommendation_json",
    "replay",
    "rerank_json",
    "rerank_sheets",
    "run_report_json",
    "second_sheet",
    "served_questions",
    "shown_bad",
    "spend_always",
    "spend_gated",
    "spend_never",
    "summarise",
    "sweep_betas",
    "sweep_ik",
    "sweep_plug_in",
    "sweep_thresholds",
    "sweep_transfer",
    "sweep_variants",
    "time_gates",
]
