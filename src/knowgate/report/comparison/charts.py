"""The pictures of an evaluation. Numbers come from it as they are; nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from knowgate.display import Axis, Point, fitting_axis, percent, points
from knowgate.evaluation import Evaluation, Frontier, GateResult
from knowgate.report.bars import Bar, Group, Row, bar_chart, dot_rows, key
from knowgate.report.comparison.policy import Policy, Slice, is_plain, ranked_gates
from knowgate.report.field import Field
from knowgate.report.lines import Line, Mark, line_plot, look
from knowgate.statistics import Bools, Floats, estimate_mean

FINE, COARSE = 60, 30  # points of a line that is drawn at once, and of one on demand
BINS = 10
WIDE, HIGH = 560, 360  # of a small picture


def trade_off(evaluation: Evaluation, policy: Policy | None) -> str:
    """Accuracy against the share of questions retrieved for, with five lines at most; others on demand."""
    lines = list(_trade_off_lines(evaluation, policy))
    heights = [point.y for line in lines for point in line.points]
    field = Field(Axis("searches, as a share of the questions"), fitting_axis("accuracy", heights))
    ends = [_end(evaluation, name, rate) for name, rate in (("never", 0.0), ("always", 1.0))]
    about = (
        f"Without any search {percent(ends[0].at.y)} of the answers are right, with all of them "
        f"{percent(ends[1].at.y)}. Lines above the straight one choose better than chance."
    )
    return line_plot(field, lines, "Accuracy against searches", about, ends)


def _trade_off_lines(evaluation: Evaluation, policy: Policy | None) -> Iterator[Line]:
    ranked = ranked_gates(evaluation)
    chosen = policy.gate if policy else None
    plain = next((gate for gate in ranked if is_plain(gate) and gate is not chosen), None)
    if policy:
        yield _gate_line(policy.gate, "k0 strong", FINE, mark=_policy_mark(policy))
    if plain:
        yield _gate_line(plain, "k1", FINE, suffix=" (best that needs no fitting)")
    ends = [evaluation.gate(name).measures["accuracy"].value or 0.0 for name in ("never", "always")]
    yield Line("at random", [Point(0, ends[0]), Point(1, ends[1])], "kgrey d2")
    yield _gate_line(evaluation.gate("oracle"), "kink d1", FINE, suffix=" (the ceiling)")
    others = [gate for gate in ranked if gate not in (chosen, plain)]
    yield from (_gate_line(gate, look(number + 2), COARSE, is_on=False) for number, gate in enumerate(others))


def _gate_line(
    gate: GateResult, style: str, steps: int, *, mark: Mark | None = None, suffix: str = "", is_on: bool = True
) -> Line:
    curve = gate.frontier
    drawn = [] if curve is None else _steps(curve, steps)
    return Line(f"{gate.gate}{suffix}", drawn, style, mark, is_on)


def _steps(curve: Frontier, steps: int) -> list[Point]:
    return [Point(step / steps, curve.at(step / steps)) for step in range(steps + 1)]


def _policy_mark(policy: Policy) -> Mark:
    accuracy, rate = estimate_mean(policy.right.astype(float)), 1 - float(policy.skips.mean())
    says = f"{policy.name}: {percent(accuracy.value)} right at {percent(rate)} searches"
    return Mark(Point(rate, accuracy.value or 0.0), says, accuracy.low, accuracy.high)


def _end(evaluation: Evaluation, name: str, rate: float) -> Mark:
    accuracy = evaluation.gate(name).measures["accuracy"].value or 0.0
    return Mark(Point(rate, accuracy), f"{name} retrieve: {percent(accuracy)}", label=name)


def slice_effects(parts: Sequence[Slice], resamples: int) -> str:
    """What skipping changes in each part of the questions."""
    rows = []
    for part in parts:
        found = estimate_mean(part.changes, resamples)
        says = f"{part.name}: {points(found.value or 0.0)} points, {percent(part.skipped)} skipped, n = {part.n}"
        rows.append(Row(part.name, found.value or 0.0, found.low, found.high, says))
    about = "; ".join(row.says for row in rows)
    return dot_rows(rows, "Accuracy against always retrieving, by part", about, "points against always retrieving")


# --- ranking and calibration ----------------------------------------------------------------------


def roc(evaluation: Evaluation, gates: Sequence[GateResult]) -> str:
    """How many unknown questions are caught at the price of known ones."""
    wrong = ~evaluation.trial.closed_right
    lines = [
        Line(f"{gate.gate} ({gate.measures['auroc'].shown(2)})", roc_points(wrong, gate.needs), look(number))
        for number, gate in enumerate(gates)
    ]
    lines.append(Line("chance", [Point(0, 0), Point(1, 1)], "kgrey d2"))
    field = Field(
        Axis("known questions retrieved for"), Axis("unknown questions retrieved for"), width=WIDE, height=HIGH
    )
    return line_plot(field, lines, "ROC curves", "; ".join(line.name for line in lines[:-1]))


def roc_points(wrong: Bools, needs: Floats) -> list[Point]:
    """(share of known, share of unknown questions) above each threshold, thinned."""
    thresholds = np.unique(np.quantile(needs, np.linspace(0, 1, FINE), method="inverted_cdf"))[::-1]
    known, unknown = np.sort(needs[~wrong]), np.sort(needs[wrong])
    if not len(known) or not len(unknown):
        return []
    above = [Point(_above(known, one), _above(unknown, one)) for one in thresholds]
    return [*above, Point(1.0, 1.0)]


def _above(ordered: Floats, threshold: float) -> float:
    return float(1 - np.searchsorted(ordered, threshold, side="right") / len(ordered))


def reliability(evaluation: Evaluation, gate: GateResult) -> str:
    """How often the closed-book answer is wrong among questions of about the same need."""
    bins = np.minimum((gate.needs * BINS).astype(int), BINS - 1)
    wrong = ~evaluation.trial.closed_right
    filled = [number for number in range(BINS) if np.any(bins == number)]
    dots = [Point(float(gate.needs[bins == b].mean()), float(wrong[bins == b].mean())) for b in filled]
    marks = [
        Mark(dot, f"need {dot.x:.2f}: wrong {percent(dot.y)}, n = {int(np.sum(bins == b))}")
        for dot, b in zip(dots, filled, strict=True)
    ]
    lines = [Line("calibrated", [Point(0, 0), Point(1, 1)], "kgrey d2"), Line(gate.gate, dots, "k0")]
    field = Field(Axis("need"), Axis("closed-book answers wrong"), x_share=False, width=WIDE, height=HIGH)
    about = "; ".join(mark.says for mark in marks)
    return line_plot(field, lines, f"Calibration of {gate.gate}", about, marks)


def histogram(evaluation: Evaluation, gate: GateResult) -> str:
    """How need is spread over questions that the LLM knows and does not know."""
    edges = np.linspace(0, 1, BINS + 1)
    known = evaluation.trial.closed_right
    shares = [np.histogram(gate.needs[part], edges)[0] / max(1, len(known)) for part in (known, ~known)]
    looks = (("closed-book answer right", "k0"), ("wrong", "k1"))
    groups = [
        Group(f"{edges[b]:.1f}", [_bar(float(share[b]), *one) for share, one in zip(shares, looks, strict=True)])
        for b in range(BINS)
    ]
    top = max(float(share.max()) for share in shares)
    field = Field(Axis("need, from"), fitting_axis("share of questions", [0.0, top]), width=WIDE, height=HIGH)
    about = "; ".join(bar.says for group in groups for bar in group.bars)
    return bar_chart(field, groups, f"Needs of {gate.gate}", about) + key(looks)


def _bar(share: float, name: str, style: str) -> Bar:
    return Bar(share, style, f"{name}: {percent(share)}")
