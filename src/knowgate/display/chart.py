"""Curves over shares as a small SVG picture, drawn without a plotting library. Knows nothing of what they show."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.display.controls import one_harmless_line
from knowgate.markup import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#8a949e"
LEFT, TOP, BOTTOM, LINE = 52, 14, 40, 18  # margins, and the height of a line of the legend
MOST = 150  # points of a curve; more cannot be seen


class Point(NamedTuple):
    """Two shares."""

    x: float
    y: float


@dataclass(frozen=True)
class Curve:
    """A line through points. mark: a dot on it, where a threshold puts a gate, say."""

    name: str
    points: Sequence[Point]
    colour: str = COLOURS[0]
    dashed: bool = False
    mark: Point | None = None


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
class Frame:
    """The field curves are drawn in."""

    x: Axis
    y: Axis
    width: int = 300
    height: int = 240

    def at(self, point: Point) -> str:
        return f"{self.across(point.x):.1f},{self.down(point.y):.1f}"

    def across(self, value: float) -> float:
        return LEFT + self.width * self.x.share(value)

    def down(self, value: float) -> float:
        return TOP + self.height * (1 - self.y.share(value))


def line_chart(curves: Sequence[Curve], frame: Frame) -> str:
    """An SVG element with a legend beside the field."""
    legend = 30 + 7 * max((len(curve.name) for curve in curves), default=0)
    width, height = LEFT + frame.width + legend, TOP + max(frame.height + BOTTOM, LINE * (len(curves) + 1))
    parts = [*_grid(frame), *(part for curve in curves for part in _drawn(curve, frame)), *_legend(curves, frame)]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
    )
    return f"{opening}{''.join(parts)}</svg>\n"


def fitting_axis(title: str, values: Sequence[float]) -> Axis:
    """An axis of whole twentieths around these values."""
    low, high = int(min(values) * 20) / 20, -int(-max(values) * 20 // 1) / 20
    return Axis(title, max(0.0, low), min(1.0, max(high, low + 0.05)))


def as_image(svg: str, about: str) -> str:
    """A picture that came from a file, for a page: shown as an image, in which no script can run."""
    data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
    return f'<img alt="{escape(about)}" src="data:image/svg+xml;base64,{data}">'


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most so many points as can be seen, the ends among them."""
    if len(points) <= MOST:
        return list(points)
    return [points[round(step * (len(points) - 1) / (MOST - 1))] for step in range(MOST)]


def _grid(frame: Frame) -> Iterator[str]:
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{frame.width}" height="{frame.height}" fill="none" stroke="{GREY}" '
        'stroke-width="0.6"/>'
    )
    foot = TOP + frame.height
    for value in frame.x.ticks:
        yield _text(frame.across(value), foot + 14, f"{value:.0%}", "middle")
    for value in frame.y.ticks:
        yield _text(LEFT - 5, frame.down(value) + 4, f"{value:.0%}", "end")
    yield _text(LEFT + frame.width / 2, foot + 32, frame.x.title, "middle")
    middle = TOP + frame.height / 2
    yield _text(12, middle, frame.y.title, "middle", turned=True)


def _text(x: float, y: float, words: str, anchor: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(one_harmless_line(words))}</text>'


def _drawn(curve: Curve, frame: Frame) -> Iterator[str]:
    points = " ".join(frame.at(point) for point in thinned(curve.points))
    yield f'<polyline points="{points}" fill="none" {_stroke(curve)}/>'
    if curve.mark is not None:
        x, y = frame.across(curve.mark.x), frame.down(curve.mark.y)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{escape(curve.colour)}"/>'


def _stroke(curve: Curve) -> str:
    dashes = ' stroke-dasharray="4"' if curve.dashed else ""
    return f'stroke="{escape(curve.colour)}" stroke-width="1.8"{dashes}'


def _legend(curves: Sequence[Curve], frame: Frame) -> Iterator[str]:
    start = LEFT + frame.width + 8
    for place, curve in enumerate(curve for curve in curves if curve.name):
        y = TOP + LINE * (place + 0.5)
        yield f'<line x1="{start}" y1="{y}" x2="{start + 14}" y2="{y}" {_stroke(curve)}/>'
        yield _text(start + 18, y + 4, curve.name, "start")
