"""The charts of an evaluation, as plotly figures in plain data."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from knowgate.evaluation import Evaluation, GateResult
from knowgate.report.charts import GRID, RUNS, Figure, axis, figure, plain_legend

POINTS = 120  # of a curve: more cannot be seen
BINS = 10
DASHES = ("solid", "dash", "dot", "dashdot")


def trade_off(evaluation: Evaluation) -> Figure:
    """Accuracy against retrieval rate: every gate's curve, its threshold with interval, random line and oracle."""
    gates = [gate for gate in evaluation.gates if gate.frontier is not None and "auroc" in gate.measures]
    traces: list[Figure] = []
    for number, gate in enumerate(gates):
        traces += [_curve(gate, number), _point(gate, number)]
    traces += [_line(evaluation, "oracle", "#000000", "dash"), _random(evaluation)]
    xaxis = {**axis("retrieval rate"), "tickformat": ".0%", "range": [-0.02, 1.02]}
    yaxis = {**axis("accuracy"), "tickformat": ".0%"}
    legend = {"orientation": "v", "x": 1.02, "y": 1, "xanchor": "left", "yanchor": "top"}
    return figure(traces, height=520, xaxis=xaxis, yaxis=yaxis, legend=legend)


def _curve(gate: GateResult, number: int) -> Figure:
    assert gate.frontier is not None
    rates = np.linspace(0, 1, POINTS)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": html.escape(gate.gate),
        "legendgroup": gate.gate,
        "x": [round(float(rate), 4) for rate in rates],
        "y": [round(gate.frontier.at(float(rate)), 4) for rate in rates],
        "line": _style(number),
        "hovertemplate": "%{x:.0%} retrieved: %{y:.1%}<extra>%{fullData.name}</extra>",
    }


def _style(number: int) -> dict[str, Any]:
    return {"color": RUNS[number % len(RUNS)], "width": 1.8, "dash": DASHES[number // len(RUNS) % len(DASHES)]}


def _point(gate: GateResult, number: int) -> Figure:
    """Where the gate's own threshold puts it."""
    accuracy, rate = gate.measures["accuracy"], gate.measures["rate"]
    value = accuracy.value or 0.0
    return {
        "type": "scatter",
        "mode": "markers",
        "name": html.escape(gate.gate),
        "legendgroup": gate.gate,
        "showlegend": False,
        "x": [round(rate.value or 0.0, 4)],
        "y": [round(value, 4)],
        "error_y": {
            "type": "data",
            "array": [round((accuracy.high or value) - value, 4)],
            "arrayminus": [round(value - (accuracy.low or value), 4)],
            "thickness": 1,
        },
        "marker": {"color": RUNS[number % len(RUNS)], "size": 8},
        "hovertemplate": "threshold %{customdata}: %{y:.1%} at %{x:.0%}<extra>%{fullData.name}</extra>",
        "customdata": [round(gate.threshold, 3)],
    }


def _line(evaluation: Evaluation, name: str, colour: str, dash: str) -> Figure:
    curve = evaluation.gate(name).frontier
    assert curve is not None
    rates = np.linspace(0, 1, POINTS)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(float(rate), 4) for rate in rates],
        "y": [round(curve.at(float(rate)), 4) for rate in rates],
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
    }


def _random(evaluation: Evaluation) -> Figure:
    never, always = (evaluation.gate(name).measures["accuracy"].value for name in ("never", "always"))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "matched random",
        "x": [0, 1],
        "y": [never, always],
        "line": {"color": "#7B8794", "width": 2, "dash": "dot"},
        "hoverinfo": "skip",
    }


def reliability(evaluation: Evaluation, gate: GateResult) -> Figure:
    """How often the closed-book answer is wrong among questions of about the same need; a calibrated gate is on the
    diagonal."""
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.minimum((gate.needs * BINS).astype(int), BINS - 1)
    wrong = ~evaluation.trial.closed_right
    filled = [b for b in range(BINS) if np.any(bins == b)]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(gate.gate),
        "x": [round(float(gate.needs[bins == b].mean()), 4) for b in filled],
        "y": [round(float(wrong[bins == b].mean()), 4) for b in filled],
        "customdata": [int(np.sum(bins == b)) for b in filled],
        "marker": {"color": RUNS[0], "size": [6 + 14 * float(np.mean(bins == b)) for b in filled]},
        "line": {"color": RUNS[0], "width": 1.5},
        "hovertemplate": "need %{x:.2f}: wrong %{y:.1%}, n = %{customdata}<extra></extra>",
    }
    diagonal = {
        "type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip", "showlegend": False,
        "line": {"color": GRID, "width": 2},
    }  # fmt: skip
    xaxis = {**axis("need"), "range": [0, float(edges[-1])]}
    yaxis = axis("closed-book answer wrong", percent_range=True)
    return figure([diagonal, trace], height=300, xaxis=xaxis, yaxis=yaxis, showlegend=False)


def histogram(evaluation: Evaluation, gate: GateResult) -> Figure:
    """How need is spread, per data set: it characterises the data set."""
    kinds = [values.get("data set", "all") for values in evaluation.trial.slices()]
    edges = np.linspace(0, 1, 21)
    centres = [round(float(value), 3) for value in (edges[:-1] + edges[1:]) / 2]
    traces = []
    for number, kind in enumerate(sorted(set(kinds))):
        needs = gate.needs[np.array([own == kind for own in kinds])]
        counts = np.histogram(needs, edges)[0] / max(1, len(needs))
        traces.append(
            {
                "type": "bar",
                "name": html.escape(kind),
                "x": centres,
                "y": [round(float(value), 4) for value in counts],
                "marker": {"color": RUNS[number % len(RUNS)]},
                "hovertemplate": "need %{x:.2f}: %{y:.1%}<extra>%{fullData.name}</extra>",
            }
        )
    layout = {"xaxis": axis("need"), "yaxis": {**axis("share of questions"), "tickformat": ".0%"}}
    mode = "overlay" if len(traces) == 1 else "group"
    return figure(traces, height=300, barmode=mode, legend=plain_legend(), **layout)
