"""Curves over shares as a small SVG picture, drawn without a plotting library. Knows nothing of what they show."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.core.display import sanitize_line
from knowgate.types.markup import escape_html

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GRAY = "#8a949e"
LEFT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN, LEGEND_LINE_HEIGHT = (
    52,
    14,
    40,
    18,
)  # margins, and the height of a line of the legend
MAX_POINTS = 150  # points of a curve; more cannot be seen


class ChartPoint(NamedTuple):
    """Two shares."""

    x: float
    y: float


@dataclass(frozen=True)
class Curve:
    """A line through points. mark: a dot on it, where a threshold puts a gate, say."""

    name: str
    points: Sequence[ChartPoint]
    colour: str = COLORS[0]
    dashed: bool = False
    mark: ChartPoint | None = None


@dataclass(frozen=True)
class Axis:
    """What a direction means, and the shares it goes from and to."""

    title: str
    low: float = 0.0
    high: float = 1.0

    def share(self, value: float) -> float:
        """Where a value lies between both ends."""
        return (value - self.low) / ((self.high - self.low) or 1.0)

    @property
    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * step / 4 for step in range(5)]


@dataclass(frozen=True)
class ChartFrame:
    """The field curves are drawn in."""

    x: Axis
    y: Axis
    width: int = 300
    height: int = 240

    def at(self, point: ChartPoint) -> str:
        return f"{self.across(point.x):.1f},{self.down(point.y):.1f}"

    def across(self, value: float) -> float:
        return LEFT_MARGIN + self.width * self.x.share(value)

    def down(self, value: float) -> float:
        return TOP_MARGIN + self.height * (1 - self.y.share(value))


def render_line_chart(curves: Sequence[Curve], frame: ChartFrame) -> str:
    """An SVG element with a legend beside the field."""
    legend = 30 + 7 * max((len(curve.name) for curve in curves), default=0)
    width, height = (
        LEFT_MARGIN + frame.width + legend,
        TOP_MARGIN + max(frame.height + BOTTOM_MARGIN, LEGEND_LINE_HEIGHT * (len(curves) + 1)),
    )
    parts = [*_grid(frame), *(part for curve in curves for part in _drawn(curve, frame)), *_legend(curves, frame)]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )
    return f"{opening}{''.join(parts)}</svg>\n"


def fit_axis(title: str, values: Sequence[float]) -> Axis:
    """An axis of whole twentieths around these values."""
    low, high = int(min(values) * 20) / 20, -int(-max(values) * 20 // 1) / 20
    return Axis(title, max(0.0, low), min(1.0, max(high, low + 0.05)))


def embed_svg(svg: str, about: str) -> str:
    """A picture that came from a file, for a page: shown as an image, in which no script can run."""
    data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
    return f'<img alt="{escape_html(about)}" src="data:image/svg+xml;base64,{data}">'


def thin_points(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """At most so many points as can be seen, the ends among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    return [points[round(step * (len(points) - 1) / (MAX_POINTS - 1))] for step in range(MAX_POINTS)]


def _grid(frame: ChartFrame) -> Iterator[str]:
    yield (
        f'<rect x="{LEFT_MARGIN}" y="{TOP_MARGIN}" width="{frame.width}" height="{frame.height}" fill="none" stroke="{GRAY}" '
        'stroke-width="0.6"/>'
    )
    foot = TOP_MARGIN + frame.height
    for value in frame.x.ticks:
        yield _text(frame.across(value), foot + 14, f"{value:.0%}", "middle")
    for value in frame.y.ticks:
        yield _text(LEFT_MARGIN - 5, frame.down(value) + 4, f"{value:.0%}", "end")
    yield _text(LEFT_MARGIN + frame.width / 2, foot + 32, frame.x.title, "middle")
    middle = TOP_MARGIN + frame.height / 2
    yield _text(12, middle, frame.y.title, "middle", turned=True)


def _text(x: float, y: float, words: str, anchor: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape_html(sanitize_line(words))}</text>'


def _drawn(curve: Curve, frame: ChartFrame) -> Iterator[str]:
    points = " ".join(frame.at(point) for point in thin_points(curve.points))
    yield f'<polyline points="{points}" fill="none" {_stroke(curve)}/>'
    if curve.mark is not None:
        x, y = frame.across(curve.mark.x), frame.down(curve.mark.y)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{escape_html(curve.colour)}"/>'


def _stroke(curve: Curve) -> str:
    dashes = ' stroke-dasharray="4"' if curve.dashed else ""
    return f'stroke="{escape_html(curve.colour)}" stroke-width="1.8"{dashes}'


def _legend(curves: Sequence[Curve], frame: ChartFrame) -> Iterator[str]:
    start = LEFT_MARGIN + frame.width + 8
    for place, curve in enumerate(curve for curve in curves if curve.name):
        y = TOP_MARGIN + LEGEND_LINE_HEIGHT * (place + 0.5)
        yield f'<line x1="{start}" y1="{y}" x2="{start + 14}" y2="{y}" {_stroke(curve)}/>'
        yield _text(start + 18, y + 4, curve.name, "start")
