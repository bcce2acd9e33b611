"""Line charts of values from 0 to 1, drawn as SVG without a plotting library."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.core.display import sanitize_line
from knowgate.types.markup import escape_html

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GRAY = "#8a949e"
LEFT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN, LEGEND_LINE_HEIGHT = 52, 14, 40, 18  # pixels
MAX_POINTS = 150  # points drawn per curve; more could not be distinguished


class ChartPoint(NamedTuple):
    """Point of a curve. Both coordinates are shares from 0 to 1, shown as percentages."""

    x: float
    y: float


@dataclass(frozen=True)
class Curve:
    """Line through points.

    Attributes:
        name: Name in the legend; a curve without a name has no legend entry.
        points: Points that the line connects.
        color: SVG color of the line.
        dashed: Whether the line is dashed.
        mark: Point at which to draw a dot, such as the operating point of a gate; None for no dot.
    """

    name: str
    points: Sequence[ChartPoint]
    color: str = COLORS[0]
    dashed: bool = False
    mark: ChartPoint | None = None


@dataclass(frozen=True)
class Axis:
    """Axis of a chart, with a title and the range of values from `low` to `high`."""

    title: str
    low: float = 0.0
    high: float = 1.0

    def scale(self, value: float) -> float:
        """Return where a value lies on the axis: 0 at `low`, 1 at `high`."""
        return (value - self.low) / ((self.high - self.low) or 1.0)  # `or` avoids a division by 0

    @property
    def ticks(self) -> list[float]:
        """Five evenly spaced values from `low` to `high`."""
        return [self.low + (self.high - self.low) * step / 4 for step in range(5)]


@dataclass(frozen=True)
class ChartFrame:
    """Plot area of a chart: its two axes, and its width and height in pixels."""

    x: Axis
    y: Axis
    width: int = 300
    height: int = 240

    def locate(self, point: ChartPoint) -> str:
        """Return the pixel coordinates of a point as 'x,y', as SVG writes them."""
        return f"{self.to_pixel_x(point.x):.1f},{self.to_pixel_y(point.y):.1f}"

    def to_pixel_x(self, value: float) -> float:
        """Return the horizontal pixel position of a value of the x axis."""
        return LEFT_MARGIN + self.width * self.x.scale(value)

    def to_pixel_y(self, value: float) -> float:
        """Return the vertical pixel position of a value of the y axis. SVG counts pixels from the top."""
        return TOP_MARGIN + self.height * (1 - self.y.scale(value))


def render_line_chart(curves: Sequence[Curve], frame: ChartFrame) -> str:
    """Render curves as an SVG element with a legend at the right."""
    # A legend entry takes 30 pixels for its line and about 7 pixels per character.
    legend_width = 30 + 7 * max((len(curve.name) for curve in curves), default=0)
    width = LEFT_MARGIN + frame.width + legend_width
    height = TOP_MARGIN + max(frame.height + BOTTOM_MARGIN, LEGEND_LINE_HEIGHT * (len(curves) + 1))
    lines = itertools.chain.from_iterable(_render_curve(curve, frame) for curve in curves)
    elements = [*_render_axes(frame), *lines, *_render_legend(curves, frame)]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )
    return f"{opening}{''.join(elements)}</svg>\n"


def fit_axis(title: str, values: Sequence[float]) -> Axis:
    """Make an axis around all values, in steps of 5 %. Example: values from 0.32 to 0.48 give 0.3 to 0.5."""
    # There are 20 steps of 5 %.
    low = math.trunc(min(values) * 20) / 20
    high = math.ceil(max(values) * 20) / 20
    return Axis(title, max(0.0, low), min(1.0, max(high, low + 0.05)))


def embed_svg(svg: str, description: str) -> str:
    """Embed an SVG in an HTML `<img>` tag. Browsers run no scripts there, so the SVG may come from anywhere."""
    data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
    return f'<img alt="{escape_html(description)}" src="data:image/svg+xml;base64,{data}">'


def thin_points(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Reduce a curve to at most MAX_POINTS points, keeping both ends."""
    if len(points) <= MAX_POINTS:
        return list(points)
    spacing = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(number * spacing)] for number in range(MAX_POINTS)]


def _render_axes(frame: ChartFrame) -> Iterator[str]:
    """Yield the SVG elements of the frame, tick labels and axis titles."""
    yield (
        f'<rect x="{LEFT_MARGIN}" y="{TOP_MARGIN}" width="{frame.width}" height="{frame.height}" fill="none" '
        f'stroke="{GRAY}" stroke-width="0.6"/>'
    )
    bottom = TOP_MARGIN + frame.height
    for value in frame.x.ticks:
        yield _render_text(frame.to_pixel_x(value), bottom + 14, f"{value:.0%}", "middle")
    for value in frame.y.ticks:
        yield _render_text(LEFT_MARGIN - 5, frame.to_pixel_y(value) + 4, f"{value:.0%}", "end")
    yield _render_text(LEFT_MARGIN + frame.width / 2, bottom + 32, frame.x.title, "middle")
    yield _render_text(12, TOP_MARGIN + frame.height / 2, frame.y.title, "middle", is_rotated=True)


def _render_text(x: float, y: float, text: str, anchor: str, *, is_rotated: bool = False) -> str:
    """Render an SVG text element with escaped text."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if is_rotated else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{rotation}>{escape_html(sanitize_line(text))}</text>'


def _render_curve(curve: Curve, frame: ChartFrame) -> Iterator[str]:
    """Yield the SVG elements of a curve and its mark."""
    points = " ".join(frame.locate(point) for point in thin_points(curve.points))
    yield f'<polyline points="{points}" fill="none" {_format_stroke(curve)}/>'
    if curve.mark is not None:
        x = frame.to_pixel_x(curve.mark.x)
        y = frame.to_pixel_y(curve.mark.y)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{escape_html(curve.color)}"/>'


def _format_stroke(curve: Curve) -> str:
    """Return the SVG stroke attributes of a curve."""
    dashes = ' stroke-dasharray="4"' if curve.dashed else ""
    return f'stroke="{escape_html(curve.color)}" stroke-width="1.8"{dashes}'


def _render_legend(curves: Sequence[Curve], frame: ChartFrame) -> Iterator[str]:
    """Yield the SVG elements of the legend."""
    x = LEFT_MARGIN + frame.width + 8
    for number, curve in enumerate(curve for curve in curves if curve.name):
        y = TOP_MARGIN + LEGEND_LINE_HEIGHT * (number + 0.5)
        yield f'<line x1="{x}" y1="{y}" x2="{x + 14}" y2="{y}" {_format_stroke(curve)}/>'
        yield _render_text(x + 18, y + 4, curve.name, "start")
