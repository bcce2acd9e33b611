"""The report's charts as plotly figures in plain data: no plotly is needed to make them."""

from __future__ import annotations

import html
from collections.abc import Sequence

from knowgate.display import percent
from knowgate.evaluation import Interval, RunReport, Saving
from knowgate.report.boundary.sheets import SIDE_NAMES as PANEL_NAMES
from knowgate.report.boundary.sheets import interval_name, panel
from knowgate.report.charts import FONT, RUNS, Figure, axis, figure, plain_legend
from knowgate.statistics import Share

# Okabe and Ito's colours: told apart with every kind of colour vision
SIDES = {"closed": "#7B8794", "open": "#0072B2", "mask": "#E69F00"}
SIDE_NAMES = {"closed": "closed book", "open": "open book", "mask": "MASK"}
EFFECTS = {"beneficial": "#0072B2", "neutral": "#C9CED3", "harmful": "#D55E00"}


def accuracy(runs: Sequence[RunReport]) -> Figure:
    """Bars per run with intervals (the paper's Figure 1)."""
    traces = []
    for side in SIDES:
        shares: list[Share] = [getattr(run.boundary.accuracy, side) for run in runs]
        if any(share.n for share in shares):
            traces.append(_bars(SIDE_NAMES[side], SIDES[side], runs, shares))
    return figure(traces, barmode="group", yaxis=axis("accuracy", percent_range=True), legend=plain_legend())


def copying(runs: Sequence[RunReport]) -> Figure | None:
    """MASK among answers with certainty 1, per run (the paper's Figure 2); None when no run has any."""
    masked = [run for run in runs if run.boundary.copying and run.boundary.copying.is_mask.n]
    if not masked:
        return None
    traces = [
        _bars(name, colour, masked, [getattr(run.boundary.copying, part) for run in masked])
        for part, name, colour in (
            ("is_mask", "answer is MASK", SIDES["mask"]),
            ("says_mask", "answer holds MASK", "#F5D491"),
        )
    ]
    return figure(traces, barmode="group", yaxis=axis("share of answers", percent_range=True), legend=plain_legend())


def effects(run: RunReport, indicator: str, side: str = "closed") -> Figure:
    """Stacked shares per interval (a panel of the paper's Figure 3)."""
    intervals = panel(run, indicator, side)
    labels = [f"{interval_name(item)}<br>{f'n = {item.n}' if item.n else 'empty'}" for item in intervals]
    traces = [
        {
            "type": "bar",
            "name": effect,
            "x": labels,
            "y": [_part(item, effect) for item in intervals],
            "customdata": [getattr(item, effect) for item in intervals],
            "marker": {"color": colour},
            "hovertemplate": "%{fullData.name}: %{y:.1%} (%{customdata})<extra></extra>",
        }
        for effect, colour in EFFECTS.items()
    ]
    xaxis = {**axis(f"{PANEL_NAMES[side]} {indicator}"), "type": "category"}
    yaxis = axis("share of questions", percent_range=True)
    return figure(traces, barmode="stack", bargap=0.15, xaxis=xaxis, yaxis=yaxis, legend=plain_legend())


def _part(item: Interval, effect: str) -> float | None:
    return round(getattr(item, effect) / item.n, 4) if item.n else None


def savings(runs: Sequence[RunReport], indicator: str) -> Figure | None:
    """Accuracy kept against retrieval saved, a line per run and its matched random; None when no run has both."""
    traces: list[Figure] = []
    for number, run in enumerate(runs):
        saving = run.boundary.savings[indicator]
        if saving is not None:
            traces += [_curve(run, saving, number, indicator), _random(saving, number, is_first=not traces)]
    if not traces:
        return None
    xaxis = {**axis("retrieval saved"), "tickformat": ".0%", "range": [-0.02, 1.02]}
    yaxis = {**axis("accuracy"), "tickformat": ".0%"}
    return figure(traces, height=400, xaxis=xaxis, yaxis=yaxis, legend=plain_legend())


def _curve(run: RunReport, saving: Saving, number: int, indicator: str) -> Figure:
    colour = RUNS[number % len(RUNS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(run.name),
        "x": [round(point.saved, 4) for point in saving.points],
        "y": [round(point.accuracy, 4) for point in saving.points],
        "text": [_threshold(point.threshold, indicator) for point in saving.points],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "%{text}<br>saved %{x:.1%}, accuracy %{y:.1%}<extra>%{fullData.name}</extra>",
    }


def _random(saving: Saving, number: int, *, is_first: bool) -> Figure:
    """Skipping at random: a straight line from always to never. One entry in the legend speaks for all."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "matched random",
        "showlegend": is_first,
        "legendrank": 2000,  # after the runs, which have 1000
        "x": [0, 1],
        "y": [round(saving.always, 4), round(saving.never, 4)],
        "line": {"color": RUNS[number % len(RUNS)], "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
    }


def _threshold(value: float | None, indicator: str) -> str:
    return "always retrieve" if value is None else f"skip if {indicator} ≥ {value:.3g}"


def _bars(name: str, colour: str, runs: Sequence[RunReport], shares: Sequence[Share]) -> Figure:
    upper = [0 if s.high is None or s.value is None else round(s.high - s.value, 4) for s in shares]
    lower = [0 if s.low is None or s.value is None else round(s.value - s.low, 4) for s in shares]
    return {
        "type": "bar",
        "name": name,
        "x": [html.escape(run.name) for run in runs],
        "y": [None if share.value is None else round(share.value, 4) for share in shares],
        "text": [percent(share.value) if share.n else "" for share in shares],
        "textposition": "inside",
        "insidetextanchor": "start",
        "insidetextfont": {"color": "#ffffff" if colour in (SIDES["closed"], SIDES["open"]) else FONT["color"]},
        "textangle": 0,
        "customdata": [share.n for share in shares],
        "marker": {"color": colour},
        "error_y": {"type": "data", "array": upper, "arrayminus": lower, "color": "#52606d", "thickness": 1.2},
        "hovertemplate": "%{fullData.name}: %{y:.1%}, n = %{customdata}<extra></extra>",
    }
