"""The pictures of an evaluation. Numbers come from it as they are; nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from knowgate.core.chart import Axis, ChartPoint, fit_axis
from knowgate.core.display import format_percent, format_points
from knowgate.evaluation.frontier import Frontier
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.recommendation import Recommendation
from knowgate.evaluation.report.charts import (
    Bar,
    BarGroup,
    DotRow,
    PlotArea,
    PlotLine,
    PlotMark,
    build_color_key,
    draw_bar_chart,
    draw_dot_chart,
    draw_line_plot,
    pick_line_style,
)
from knowgate.gates import GATES
from knowgate.stats.bootstrap import estimate_mean
from knowgate.stats.metrics import BoolArray, FloatArray


@dataclass(frozen=True)
class HighlightedPolicy:
    """A gate at a threshold: which questions it skips, and which of its final answers are right."""

    gate: GateResult
    threshold: float
    skips: BoolArray = field(repr=False)
    right: BoolArray = field(repr=False)
    is_recommended: bool = True

    @property
    def name(self) -> str:
        return f"'{self.gate.gate}' at {self.threshold:.3g}"


def select_policy(evaluation: Evaluation, advice: Recommendation) -> HighlightedPolicy | None:
    """None where no gate was evaluated that ranks questions, or no question has both answers."""
    if evaluation.trial.open_right is None:
        return None
    if advice.gate is not None and not advice.does_without and advice.threshold is not None:
        gate = evaluation.gate(advice.gate)
        return HighlightedPolicy(gate, advice.threshold, advice.skips, advice.right, advice.is_worth_it)
    best = find_best_gate(evaluation)
    if best is None:
        return None
    return HighlightedPolicy(best, best.threshold, best.needs <= best.threshold, best.right, is_recommended=False)


def rank_gates(evaluation: Evaluation) -> list[GateResult]:
    """Gates that rank questions, the best first: by the area under their curve, or by AUROC where there is none."""
    gates = [gate for gate in evaluation.gates if "auroc" in gate.measures]
    return sorted(gates, key=_quality, reverse=True)


def _quality(gate: GateResult) -> float:
    return gate.frontier.area if gate.frontier is not None else gate.measures["auroc"].value or 0.0


def find_best_gate(evaluation: Evaluation) -> GateResult | None:
    return next(iter(rank_gates(evaluation)), None)


def is_unfitted(gate: GateResult) -> bool:
    """A gate that needs no fitting: what a fitted one must beat."""
    return gate.gate.partition(":")[0] in GATES


@dataclass(frozen=True)
class PolicySlice:
    """Part of the questions under a policy. changes: of the answers against always retrieving, per question."""

    name: str
    n: int
    skipped: float
    always: float
    changes: np.ndarray[tuple[int], np.dtype[np.float64]] = field(repr=False)


def slice_policy(evaluation: Evaluation, policy: HighlightedPolicy, fewest: int) -> list[PolicySlice]:
    """Parts with at least so many questions, of dimensions that split them."""
    opened = evaluation.trial.always_right
    found = []
    for dimension in dict.fromkeys(one.dimension for one in evaluation.slices):
        parts = evaluation.trial.get_slice_values(dimension)
        values = [one.value for one in evaluation.slices if one.dimension == dimension]
        for value in values:
            inside = parts == value
            if inside.sum() >= fewest:
                changes = policy.right[inside].astype(float) - opened[inside]
                skipped, always = float(policy.skips[inside].mean()), float(opened[inside].mean())
                found.append(PolicySlice(f"{dimension}: {value}", int(inside.sum()), skipped, always, changes))
    return found


FINE_STEPS, COARSE_STEPS = 60, 30  # points of a line that is drawn at once, and of one on demand
BIN_COUNT = 10
SMALL_WIDTH, SMALL_HEIGHT = 560, 360  # of a small picture


def draw_trade_off_chart(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    """Accuracy against the share of questions retrieved for, with five lines at most; others on demand."""
    lines = list(_trade_off_lines(evaluation, policy))
    heights = [point.y for line in lines for point in line.points]
    field = PlotArea(Axis("searches, as a share of the questions"), fit_axis("accuracy", heights))
    ends = [_end(evaluation, name, rate) for name, rate in (("never", 0.0), ("always", 1.0))]
    about = (
        f"Without any search {format_percent(ends[0].at.y)} of the answers are right, with all of them "
        f"{format_percent(ends[1].at.y)}. Lines above the straight one choose better than chance."
    )
    return draw_line_plot(field, lines, "Accuracy against searches", about, ends)


def _trade_off_lines(evaluation: Evaluation, policy: HighlightedPolicy | None) -> Iterator[PlotLine]:
    ranked = rank_gates(evaluation)
    chosen = policy.gate if policy else None
    plain = next((gate for gate in ranked if is_unfitted(gate) and gate is not chosen), None)
    if policy:
        yield _gate_line(policy.gate, "k0 strong", FINE_STEPS, mark=_policy_mark(policy))
    if plain:
        yield _gate_line(plain, "k1", FINE_STEPS, suffix=" (best that needs no fitting)")
    ends = [evaluation.gate(name).measures["accuracy"].value or 0.0 for name in ("never", "always")]
    yield PlotLine("at random", [ChartPoint(0, ends[0]), ChartPoint(1, ends[1])], "kgrey d2")
    yield _gate_line(evaluation.gate("oracle"), "kink d1", FINE_STEPS, suffix=" (the ceiling)")
    others = [gate for gate in ranked if gate not in (chosen, plain)]
    yield from (
        _gate_line(gate, pick_line_style(number + 2), COARSE_STEPS, is_on=False) for number, gate in enumerate(others)
    )


def _gate_line(
    gate: GateResult, style: str, steps: int, *, mark: PlotMark | None = None, suffix: str = "", is_on: bool = True
) -> PlotLine:
    curve = gate.frontier
    drawn = [] if curve is None else _steps(curve, steps)
    return PlotLine(f"{gate.gate}{suffix}", drawn, style, mark, is_on)


def _steps(curve: Frontier, steps: int) -> list[ChartPoint]:
    return [ChartPoint(step / steps, curve.at(step / steps)) for step in range(steps + 1)]


def _policy_mark(policy: HighlightedPolicy) -> PlotMark:
    accuracy, rate = estimate_mean(policy.right.astype(float)), 1 - float(policy.skips.mean())
    says = f"{policy.name}: {format_percent(accuracy.value)} right at {format_percent(rate)} searches"
    return PlotMark(ChartPoint(rate, accuracy.value or 0.0), says, accuracy.low, accuracy.high)


def _end(evaluation: Evaluation, name: str, rate: float) -> PlotMark:
    accuracy = evaluation.gate(name).measures["accuracy"].value or 0.0
    return PlotMark(ChartPoint(rate, accuracy), f"{name} retrieve: {format_percent(accuracy)}", label=name)


def draw_slice_chart(parts: Sequence[PolicySlice], resamples: int) -> str:
    """What skipping changes in each part of the questions."""
    rows = []
    for part in parts:
        found = estimate_mean(part.changes, resamples)
        says = f"{part.name}: {format_points(found.value or 0.0)} points, {format_percent(part.skipped)} skipped, n = {part.n}"
        rows.append(DotRow(part.name, found.value or 0.0, found.low, found.high, says))
    about = "; ".join(row.says for row in rows)
    return draw_dot_chart(
        rows, "Accuracy against always retrieving, by part", about, "points against always retrieving"
    )


# --- ranking and calibration ----------------------------------------------------------------------


def draw_roc_chart(evaluation: Evaluation, gates: Sequence[GateResult]) -> str:
    """How many unknown questions are caught at the price of known ones."""
    wrong = ~evaluation.trial.closed_right
    lines = [
        PlotLine(
            f"{gate.gate} ({gate.measures['auroc'].format(2)})",
            compute_roc_points(wrong, gate.needs),
            pick_line_style(number),
        )
        for number, gate in enumerate(gates)
    ]
    lines.append(PlotLine("chance", [ChartPoint(0, 0), ChartPoint(1, 1)], "kgrey d2"))
    field = PlotArea(
        Axis("known questions retrieved for"),
        Axis("unknown questions retrieved for"),
        width=SMALL_WIDTH,
        height=SMALL_HEIGHT,
    )
    return draw_line_plot(field, lines, "ROC curves", "; ".join(line.name for line in lines[:-1]))


def compute_roc_points(wrong: BoolArray, needs: FloatArray) -> list[ChartPoint]:
    """(share of known, share of unknown questions) above each threshold, thinned."""
    thresholds = np.unique(np.quantile(needs, np.linspace(0, 1, FINE_STEPS), method="inverted_cdf"))[::-1]
    known, unknown = np.sort(needs[~wrong]), np.sort(needs[wrong])
    if not len(known) or not len(unknown):
        return []
    above = [ChartPoint(_above(known, one), _above(unknown, one)) for one in thresholds]
    return [*above, ChartPoint(1.0, 1.0)]


def _above(ordered: FloatArray, threshold: float) -> float:
    return float(1 - np.searchsorted(ordered, threshold, side="right") / len(ordered))


def draw_reliability_chart(evaluation: Evaluation, gate: GateResult) -> str:
    """How often the closed-book answer is wrong among questions of about the same need."""
    bins = np.minimum((gate.needs * BIN_COUNT).astype(int), BIN_COUNT - 1)
    wrong = ~evaluation.trial.closed_right
    filled = [number for number in range(BIN_COUNT) if np.any(bins == number)]
    dots = [ChartPoint(float(gate.needs[bins == b].mean()), float(wrong[bins == b].mean())) for b in filled]
    marks = [
        PlotMark(dot, f"need {dot.x:.2f}: wrong {format_percent(dot.y)}, n = {int(np.sum(bins == b))}")
        for dot, b in zip(dots, filled, strict=True)
    ]
    lines = [PlotLine("calibrated", [ChartPoint(0, 0), ChartPoint(1, 1)], "kgrey d2"), PlotLine(gate.gate, dots, "k0")]
    field = PlotArea(
        Axis("need"), Axis("closed-book answers wrong"), x_share=False, width=SMALL_WIDTH, height=SMALL_HEIGHT
    )
    about = "; ".join(mark.says for mark in marks)
    return draw_line_plot(field, lines, f"Calibration of {gate.gate}", about, marks)


def draw_need_histogram(evaluation: Evaluation, gate: GateResult) -> str:
    """How need is spread over questions that the LLM knows and does not know."""
    edges = np.linspace(0, 1, BIN_COUNT + 1)
    known = evaluation.trial.closed_right
    shares = [np.histogram(gate.needs[part], edges)[0] / max(1, len(known)) for part in (known, ~known)]
    looks = (("closed-book answer right", "k0"), ("wrong", "k1"))
    groups = [
        BarGroup(f"{edges[b]:.1f}", [_bar(float(share[b]), *one) for share, one in zip(shares, looks, strict=True)])
        for b in range(BIN_COUNT)
    ]
    top = max(float(share.max()) for share in shares)
    field = PlotArea(
        Axis("need, from"), fit_axis("share of questions", [0.0, top]), width=SMALL_WIDTH, height=SMALL_HEIGHT
    )
    about = "; ".join(bar.says for group in groups for bar in group.bars)
    return draw_bar_chart(field, groups, f"Needs of {gate.gate}", about) + build_color_key(looks)


def _bar(share: float, name: str, style: str) -> Bar:
    return Bar(share, style, f"{name}: {format_percent(share)}")
