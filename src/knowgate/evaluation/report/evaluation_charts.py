"""Charts of an evaluation, and the policy they highlight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from knowgate.core.chart import Axis, ChartPoint, fit_axis
from knowgate.core.display import format_percent
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.recommendation import Recommendation
from knowgate.evaluation.report import charts
from knowgate.evaluation.report.charts import SMALL_HEIGHT, SMALL_WIDTH, Bar, BarGroup, PlotArea, PlotLine, PlotMark
from knowgate.gates import GATES
from knowgate.stats.bootstrap import estimate_mean
from knowgate.stats.metrics import BoolArray

FINE_STEPS, COARSE_STEPS = 60, 30  # points of a visible line, and of a hidden one
BIN_COUNT = 10
DIAGONAL = (ChartPoint(0, 0), ChartPoint(1, 1))


# --- highlighted policy ---------------------------------------------------------------------------


@dataclass(frozen=True)
class HighlightedPolicy:
    """The gate and threshold that the report shows in detail.

    Attributes:
        gate: The gate.
        threshold: Its threshold.
        skips: Whether each question is answered without a search.
        right: Whether the final answer to each question is correct.
        is_recommended: Whether the evaluation recommends this gate. If it recommends none, the best one is shown.
    """

    gate: GateResult
    threshold: float
    skips: BoolArray = field(repr=False)
    right: BoolArray = field(repr=False)
    is_recommended: bool = True

    @property
    def name(self) -> str:
        """Gate and threshold in words."""
        return f"'{self.gate.gate}' at {self.threshold:.3g}"


def select_policy(evaluation: Evaluation, recommendation: Recommendation) -> HighlightedPolicy | None:
    """Select the policy to highlight: the gate that the recommendation names, or else the best gate.

    Returns:
        None if no answers that used passages were recorded, or if no gate ranks questions.
    """
    if not evaluation.has_open_answers:
        return None
    name, threshold = recommendation.gate, recommendation.threshold
    if name is not None and threshold is not None and not recommendation.is_without_retrieval:
        gate, is_recommended = evaluation.gate(name), recommendation.is_positive
        return HighlightedPolicy(gate, threshold, recommendation.skips, recommendation.right, is_recommended)
    best = next(iter(rank_gates(evaluation)), None)
    if best is None:
        return None
    return HighlightedPolicy(best, best.threshold, ~best.retrieve, best.right, is_recommended=False)


def rank_gates(evaluation: Evaluation) -> list[GateResult]:
    """Sort the gates from best to worst, by mean accuracy over all retrieval rates.

    If answers with passages were not recorded, the AUROC decides.
    """

    def get_quality(gate: GateResult) -> float:
        """Return the number by which gates are sorted."""
        if gate.frontier is not None:
            return gate.frontier.area
        return gate.measures["auroc"].value or 0.0

    return sorted(evaluation.ranking_gates, key=get_quality, reverse=True)


# --- trade-off ------------------------------------------------------------------------------------


def draw_trade_off_chart(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    """Draw accuracy against retrieval rate, with a line per gate. Most gates are hidden at first."""
    lines = list(_make_trade_off_lines(evaluation, policy))
    accuracies = [point.y for line in lines for point in line.points]
    y_axis = fit_axis("accuracy", accuracies)
    y_axis = replace(y_axis, high=min(y_axis.high, max(accuracies) + 0.01))  # no empty band above the lines
    area = PlotArea(Axis("searches, as a share of the questions"), y_axis)
    ends = [_make_end_mark(evaluation, name, rate) for name, rate in (("never", 0.0), ("always", 1.0))]
    description = (
        f"Without any search, {format_percent(ends[0].at.y)} of the answers are right; with a search for every "
        f"question, {format_percent(ends[1].at.y)}. Lines above the straight line choose better than chance."
    )
    return charts.draw_line_plot(area, lines, "Accuracy against searches", description, ends)


def _make_trade_off_lines(evaluation: Evaluation, policy: HighlightedPolicy | None) -> Iterator[PlotLine]:
    """Make the lines of all gates, of random retrieval and of the oracle. Most gates are hidden at first.

    Styles are CSS classes: 'k' with a number or name is a color, 'd' with a number a kind of dashes.
    """
    others = rank_gates(evaluation)
    if policy:
        others = [gate for gate in others if gate is not policy.gate]
        yield _make_gate_line(policy.gate, "k0 strong", mark=_make_policy_mark(policy))
    # A fitted gate must beat the best one that needs no fitting.
    unfitted = next((gate for gate in others if gate.gate.partition(":")[0] in GATES), None)
    if unfitted:
        others = [gate for gate in others if gate is not unfitted]
        yield _make_gate_line(unfitted, "k1", suffix=" (best that needs no fitting)")
    never, always = (evaluation.gate(name).measures["accuracy"].value or 0.0 for name in ("never", "always"))
    yield PlotLine("at random", [ChartPoint(0, never), ChartPoint(1, always)], "kgrey d2")
    yield _make_gate_line(evaluation.gate("oracle"), "kink d1", suffix=" (the ceiling)")
    for number, gate in enumerate(others, start=2):  # the styles 0 and 1 are taken
        yield _make_gate_line(gate, charts.pick_line_style(number), is_visible=False)


def _make_gate_line(
    gate: GateResult, css_class: str, *, mark: PlotMark | None = None, suffix: str = "", is_visible: bool = True
) -> PlotLine:
    """Make a gate's line of accuracy by retrieval rate. Hidden lines have fewer points than visible ones."""
    steps = FINE_STEPS if is_visible else COARSE_STEPS
    rates = [step / steps for step in range(steps + 1)]
    points = [] if gate.frontier is None else [ChartPoint(rate, gate.frontier.at(rate)) for rate in rates]
    return PlotLine(f"{gate.gate}{suffix}", points, css_class, mark, is_visible)


def _make_policy_mark(policy: HighlightedPolicy) -> PlotMark:
    """Make the dot at the accuracy and retrieval rate of the highlighted gate."""
    accuracy = estimate_mean(policy.right.astype(float))
    rate = 1 - float(policy.skips.mean())
    tooltip = f"{policy.name}: {format_percent(accuracy.value)} right at {format_percent(rate)} searches"
    return PlotMark(ChartPoint(rate, accuracy.value or 0.0), tooltip, accuracy.low, accuracy.high)


def _make_end_mark(evaluation: Evaluation, name: str, rate: float) -> PlotMark:
    """Make the dot at one end of the curves: the gate 'never' at rate 0, or the gate 'always' at rate 1."""
    accuracy = evaluation.gate(name).measures["accuracy"].value or 0.0
    return PlotMark(ChartPoint(rate, accuracy), f"{name} retrieve: {format_percent(accuracy)}", label=name)


# --- calibration ----------------------------------------------------------------------


def draw_reliability_chart(evaluation: Evaluation, gate: GateResult) -> str:
    """Draw the error rate of answers without passages, for groups of questions with similar need."""
    bin_of_question = np.minimum((gate.needs * BIN_COUNT).astype(int), BIN_COUNT - 1)
    wrong = ~evaluation.table.closed_book_right
    marks = []
    for number in range(BIN_COUNT):
        in_bin = bin_of_question == number
        if in_bin.any():
            dot = ChartPoint(float(gate.needs[in_bin].mean()), float(wrong[in_bin].mean()))
            tooltip = f"need {dot.x:.2f}: wrong {format_percent(dot.y)}, n = {int(in_bin.sum())}"
            marks.append(PlotMark(dot, tooltip))
    lines = [PlotLine("calibrated", DIAGONAL, "kgrey d2"), PlotLine(gate.gate, [mark.at for mark in marks], "k0")]
    area = PlotArea(Axis("need"), Axis("closed-book answers wrong"), SMALL_WIDTH, SMALL_HEIGHT, x_is_share=False)
    description = "; ".join(mark.tooltip for mark in marks)
    return charts.draw_line_plot(area, lines, f"Calibration of {gate.gate}", description, marks)


def draw_need_histogram(evaluation: Evaluation, gate: GateResult) -> str:
    """Draw histograms of need, for known and for unknown questions. Known means answered right without passages."""
    edges = np.linspace(0, 1, BIN_COUNT + 1)
    known = evaluation.table.closed_book_right
    n = max(1, len(known))
    known_shares = (np.histogram(gate.needs[known], edges)[0] / n).tolist()  # of all questions, for each bin
    unknown_shares = (np.histogram(gate.needs[~known], edges)[0] / n).tolist()
    groups = []
    for edge, known_share, unknown_share in zip(edges[:-1], known_shares, unknown_shares, strict=True):
        known_bar = Bar(known_share, "k0", f"closed-book answer right: {format_percent(known_share)}")
        unknown_bar = Bar(unknown_share, "k1", f"wrong: {format_percent(unknown_share)}")
        groups.append(BarGroup(f"{edge:.1f}", [known_bar, unknown_bar]))
    y_axis = fit_axis("share of questions", [0.0, *known_shares, *unknown_shares])
    area = PlotArea(Axis("need, from"), y_axis, SMALL_WIDTH, SMALL_HEIGHT)
    key = charts.build_color_key([("closed-book answer right", "k0"), ("wrong", "k1")])
    return charts.draw_bar_chart(area, groups, f"Needs of {gate.gate}") + key
