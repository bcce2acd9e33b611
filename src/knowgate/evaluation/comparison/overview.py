"""An evaluation at a glance: the main table, and accuracy against retrieval rate as a small picture."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.display import (
    COLOURS,
    GREY,
    NOTHING,
    Axis,
    Curve,
    Frame,
    Point,
    Sheet,
    fitting_axis,
    line_chart,
    percent,
    points_with_interval,
    share_with_interval,
)
from knowgate.evaluation.comparison.gate_results import GateResult

STEPS = 60  # points of a curve
DRAWN = len(COLOURS)  # gates with a curve of their own


def main_sheet(gates: Sequence[GateResult]) -> Sheet:
    """What the decisions of each gate come to; needs open-book answers."""
    columns = ("gate", "accuracy", "retrieval", "matched random", "gain", "loss", "harm", "waste", "headroom")
    return Sheet("Answers", columns, tuple(_main_row(gate) for gate in gates))


def _main_row(gate: GateResult) -> tuple[str, ...]:
    m = gate.measures
    return (
        gate.gate,
        share_with_interval(m["accuracy"]),
        percent(m["rate"].value),
        percent(m["random"].value),
        points_with_interval(m["gain"]),
        points_with_interval(m["loss"]),
        percent(m["harm"].value),
        percent(m["waste"].value),
        percent(m["recovered"].value),
    )


def short_sheet(gates: Sequence[GateResult]) -> Sheet:
    """A few columns that fit any width: of the answers where there are both kinds, and of the ranking."""
    has_open = any("accuracy" in gate.measures for gate in gates)
    columns = ("gate", *(("accuracy", "retrieval", "gain") if has_open else ()), "AUROC")
    return Sheet("Gates compared", columns, tuple(_short_row(gate, has_open=has_open) for gate in gates))


def _short_row(gate: GateResult, *, has_open: bool) -> tuple[str, ...]:
    m = gate.measures
    auroc = m["auroc"].shown() if "auroc" in m and m["auroc"].value is not None else NOTHING
    if not has_open:
        return (gate.gate, auroc)
    gain = points_with_interval(m["gain"])
    return (gate.gate, share_with_interval(m["accuracy"]), percent(m["rate"].value), gain, auroc)


def trade_off_svg(gates: Sequence[GateResult]) -> str:
    """Accuracy against retrieval rate; the dot is a gate's own threshold, the grey line retrieves at random."""
    named = {gate.gate: gate for gate in gates}
    ranked = [gate for gate in gates if gate.frontier is not None and "auroc" in gate.measures][:DRAWN]
    curves = [_curve(gate, colour) for gate, colour in zip(ranked, COLOURS, strict=False)]
    ends = [Point(rate, named[name].measures["accuracy"].value or 0.0) for rate, name in ((0, "never"), (1, "always"))]
    curves += [Curve("random", ends, GREY, dashed=True), _curve(named["oracle"], "currentColor", dashed=True)]
    heights = [point.y for curve in curves for point in curve.points]
    return line_chart(curves, Frame(Axis("retrieval rate"), fitting_axis("accuracy", heights)))


def _curve(gate: GateResult, colour: str, *, dashed: bool = False) -> Curve:
    assert gate.frontier is not None
    rates = [step / STEPS for step in range(STEPS + 1)]
    m = gate.measures
    mark = None if dashed else Point(m["rate"].value or 0.0, m["accuracy"].value or 0.0)
    return Curve(gate.gate, [Point(rate, gate.frontier.at(rate)) for rate in rates], colour, dashed, mark)
