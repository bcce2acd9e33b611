"""What all charts share: colours, fonts, axes. Figures are plotly's plain data; no plotly is needed to make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Figure = dict[str, Any]
RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FONT = {
    "family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
    "size": 13,
    "color": "#1f2933",
}
GRID = "#e4e7eb"


def axis(title: str, *, percent_range: bool = False) -> Figure:
    plain: Figure = {"title": {"text": title, "standoff": 8}, "gridcolor": GRID, "zeroline": False, "automargin": True}
    return {**plain, "range": [0, 1], "tickformat": ".0%"} if percent_range else plain


def plain_legend() -> Figure:
    return {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}


def figure(traces: Sequence[Figure], *, height: int = 340, **layout: Any) -> Figure:
    base = {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 16, "b": 56},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": FONT,
        "hoverlabel": {"font": {"size": 13}},
        "showlegend": True,
    }
    return {"data": list(traces), "layout": {**base, **layout}}
