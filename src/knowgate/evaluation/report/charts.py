"""The field of a chart: axes, grid and words around it, as SVG. Colours and letters are the style sheet's.

A chart is as wide as its place; on a narrow screen the style sheet makes its letters larger, so margins are roomy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knowgate.core.chart import Axis, ChartPoint
from knowgate.core.display import sanitize_line
from knowgate.types.markup import escape_html

TICK_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)  # between numbers along an axis
MAX_TICKS = 6
LEFT, RIGHT, TOP, BOTTOM = 78, 34, 18, 62
CHART_WIDTH, CHART_HEIGHT = 720, 400


@dataclass(frozen=True)
class PlotArea:
    """Where values lie. x_share, y_share: numbers along that axis are written in percent."""

    x: Axis
    y: Axis
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT
    x_share: bool = True
    y_share: bool = True

    def across(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * self.x.scale(value)

    def down(self, value: float) -> float:
        return TOP + (self.height - TOP - BOTTOM) * (1 - self.y.scale(value))

    @property
    def foot(self) -> float:
        return self.height - BOTTOM


def render_svg(field: PlotArea, parts: Sequence[str], title: str, about: str, kind: str = "plot") -> str:
    """An SVG element that a screen reader reads as one picture."""
    scale = {
        "x": [LEFT, field.width - RIGHT, field.x.low, field.x.high],
        "y": [field.foot, TOP, field.y.low, field.y.high],
        "shares": [field.x_share, field.y_share],
        "names": [field.x.title, field.y.title],
    }
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape_html(title)}" viewBox="0 0 {field.width} {field.height}" '
        f'data-scale="{escape_html(json.dumps(scale))}"><desc>{escape_html(about)}</desc>{"".join(parts)}</svg>'
    )


def draw_grid(field: PlotArea, *, names: Sequence[str] | None = None) -> Iterator[str]:
    """Lines and numbers; names: of places along the foot, instead of numbers."""
    for value in compute_ticks(field.y):
        y = field.down(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{field.width - RIGHT}"/>'
        yield draw_text(LEFT - 8, y + 4.5, format_tick(value, is_share=field.y_share), "end")
    if names is None:
        for value in compute_ticks(field.x):
            yield draw_text(field.across(value), field.foot + 24, format_tick(value, is_share=field.x_share), "middle")
    yield f'<path class="axis" d="M{LEFT} {field.foot}H{field.width - RIGHT}"/>'
    middle = (TOP + field.foot) / 2
    yield draw_text((LEFT + field.width - RIGHT) / 2, field.height - 10, field.x.title, "middle", "title")
    yield draw_text(16, middle, field.y.title, "middle", "title side", turned=True)


def compute_ticks(axis: Axis) -> list[float]:
    """Round numbers along an axis, six at most."""
    span = axis.high - axis.low
    step = next((one for one in TICK_STEPS if span / one <= MAX_TICKS - 1 + 1e-9), span / (MAX_TICKS - 1))
    first = math.ceil(axis.low / step - 1e-9)
    return [round(number * step, 6) for number in range(first, math.floor(axis.high / step + 1e-9) + 1)]


def draw_text(x: float, y: float, text: str, anchor: str, kind: str = "", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    name = f' class="{kind}"' if kind else ""
    line = escape_html(sanitize_line(text))
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{line}</text>'


def format_tick(value: float, *, is_share: bool = True) -> str:
    return f"{100 * value:.3g} %" if is_share else f"{value:g}"


COLOR_COUNT = 7  # of the style sheet: k0 to k6
DASH_COUNT = 3


@dataclass(frozen=True)
class PlotLine:
    """A line through points. look: a class of the style sheet. mark: a dot on it, with an interval where there is one.

    is_on: drawn from the start; others on demand.
    """

    name: str
    points: Sequence[ChartPoint]
    look: str
    mark: PlotMark | None = None
    is_on: bool = True


@dataclass(frozen=True)
class PlotMark:
    """A dot and what it says when pointed at. label: words beside it."""

    at: ChartPoint
    says: str
    low: float | None = None
    high: float | None = None
    label: str = ""


def pick_line_style(number: int) -> str:
    """The look of one line among many: colours first, then dashes."""
    return f"k{number % COLOR_COUNT} d{number // COLOR_COUNT % DASH_COUNT}"


def draw_line_plot(
    field: PlotArea, lines: Sequence[PlotLine], title: str, about: str, marks: Sequence[PlotMark] = ()
) -> str:
    """The picture and its legend."""
    parts = list(draw_grid(field))
    for number, line in enumerate(lines):
        parts += _drawn(field, line, number)
    parts += [part for mark in marks for part in _dot(field, mark, "ink")]
    return render_svg(field, parts, title, about) + build_legend(lines)


def build_legend(lines: Sequence[PlotLine]) -> str:
    """What is drawn at once, and the others folded away."""
    entries = {number: _entry(line, number) for number, line in enumerate(lines)}
    first = "".join(entry for number, entry in entries.items() if lines[number].is_on)
    rest = "".join(entry for number, entry in entries.items() if not lines[number].is_on)
    count = sum(not line.is_on for line in lines)
    more = (
        f'<details class="more"><summary>Show others in the picture ({count})</summary><ul class="legend">{rest}</ul>'
        "</details>"
        if rest
        else ""
    )
    return f'<ul class="legend">{first}</ul>{more}'


def _entry(line: PlotLine, number: int) -> str:
    ticked = " checked" if line.is_on else ""
    box = f'<input type="checkbox" data-line="{number}"{ticked}>'
    name = escape_html(sanitize_line(line.name))
    return f'<li><label>{box}<i class="swatch {line.look}"></i><bdi>{name}</bdi></label></li>'


def _drawn(field: PlotArea, line: PlotLine, number: int) -> Iterator[str]:
    points = " ".join(f"{field.across(x):.1f},{field.down(y):.1f}" for x, y in line.points)
    off = "" if line.is_on else " off"
    name = escape_html(sanitize_line(line.name))
    yield f'<g class="{line.look}{off}" data-line="{number}" data-name="{name}">'
    yield f'<polyline class="line" points="{points}"/>'
    if line.mark:
        yield from _dot(field, line.mark, "")
    yield "</g>"


def _dot(field: PlotArea, mark: PlotMark, kind: str) -> Iterator[str]:
    x, y = field.across(mark.at.x), field.down(mark.at.y)
    if mark.low is not None and mark.high is not None:
        yield f'<path class="whisker {kind}" d="M{x:.1f} {field.down(mark.low):.1f}V{field.down(mark.high):.1f}"/>'
    yield f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5" data-tip="{escape_html(mark.says)}"/>'
    if mark.label:
        right = mark.at.x > field.x.low + (field.x.high - field.x.low) / 2
        yield draw_text(
            x if right else x + 10, y + 24 if right else y + 5, mark.label, "end" if right else "start", "label"
        )


MAX_BAR_NAME = 22  # characters of a name under a bar
MAX_ROW_NAME = 28  # of one beside a row
MIN_LABELED_SHARE = 0.07  # share of a stack in which a number has no room
ROW_HEIGHT = 34  # height of a row of dots
ROW_NAME_WIDTH = 300  # room for the names of rows


@dataclass(frozen=True)
class Bar:
    """A height with its interval. says: when pointed at; label: written above it, or inside where it is stacked."""

    value: float | None
    look: str
    says: str = ""
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class BarGroup:
    """Bars that belong together, and what stands under them."""

    name: str
    bars: Sequence[Bar]
    note: str = ""


def draw_bar_chart(
    field: PlotArea, groups: Sequence[BarGroup], title: str, about: str, *, is_stacked: bool = False
) -> str:
    parts = list(draw_grid(field, names=[group.name for group in groups]))
    width = (field.width - LEFT - RIGHT) / max(1, len(groups))
    for number, group in enumerate(groups):
        start = LEFT + number * width
        parts += _stack(field, group, start, width) if is_stacked else _beside(field, group, start, width)
        parts += [draw_text(start + width / 2, field.foot + 20, _short(group.name), "middle")]
        parts += [draw_text(start + width / 2, field.foot + 36, group.note, "middle")] if group.note else []
    return render_svg(field, parts, title, about)


def build_color_key(names: Sequence[tuple[str, str]]) -> str:
    """What looks mean: (name, look)."""
    items = "".join(f'<li><i class="swatch box {look}"></i>{escape_html(name)}</li>' for name, look in names)
    return f'<ul class="legend">{items}</ul>'


def _stack(field: PlotArea, group: BarGroup, start: float, width: float) -> Iterator[str]:
    base = 0.0
    for bar in group.bars:
        if bar.value:
            yield _box(field, bar, start + width * 0.1, width * 0.8, base, base + bar.value)
            if bar.label and bar.value > MIN_LABELED_SHARE:
                yield draw_text(start + width / 2, field.down(base + bar.value / 2) + 5, bar.label, "middle", "inside")
            base += bar.value


def _beside(field: PlotArea, group: BarGroup, start: float, width: float) -> Iterator[str]:
    each = min(width * 0.84 / max(1, len(group.bars)), 90)
    first = start + (width - each * len(group.bars)) / 2
    for number, bar in enumerate(group.bars):
        if bar.value is None:
            continue
        x = first + number * each
        yield _box(field, bar, x + 2, each - 4, 0.0, bar.value)
        if bar.low is not None and bar.high is not None:
            ends = f"{field.down(bar.low):.1f}V{field.down(bar.high):.1f}"
            yield f'<path class="whisker ink" d="M{x + each / 2:.1f} {ends}"/>'
        top = field.down(bar.high if bar.high is not None else bar.value)
        yield draw_text(x + each / 2, top - 7, bar.label, "middle", "label")


def _box(field: PlotArea, bar: Bar, x: float, width: float, low: float, high: float) -> str:
    top, bottom = field.down(high), field.down(low)
    place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    return f'<rect class="bar {bar.look}" {place} data-tip="{escape_html(bar.says)}"/>'


@dataclass(frozen=True)
class DotRow:
    """A name and a value with its interval."""

    name: str
    value: float
    low: float | None
    high: float | None
    says: str


def draw_dot_chart(rows: Sequence[DotRow], title: str, about: str, axis: str) -> str:
    """Differences under each other, with a line at nothing; one picture says where they lie."""
    ends = [0.0, *(value for row in rows for value in (row.value, row.low, row.high) if value is not None)]
    room = (max(ends) - min(ends)) * 0.06 or 0.01
    x = Axis(axis, min(ends) - room, max(ends) + room)
    height = ROW_HEIGHT * len(rows) + 56
    field = PlotArea(x, Axis("", 0, 1), width=720, height=height)
    zero = _place(x, 0.0)
    parts = [f'<path class="axis" d="M{zero:.1f} 8V{height - 44}"/>']
    for number, row in enumerate(rows):
        parts += _row(x, row, 8 + ROW_HEIGHT * (number + 0.5))
    for value in sorted({min(ends), 0.0, max(ends)}):
        parts.append(draw_text(_place(x, value), height - 26, f"{100 * value:+.1f}" if value else "0", "middle"))
    parts.append(draw_text((ROW_NAME_WIDTH + 686) / 2, height - 6, axis, "middle", "title"))
    return render_svg(field, parts, title, about, kind="rows")


def _row(axis: Axis, row: DotRow, y: float) -> Iterator[str]:
    yield draw_text(ROW_NAME_WIDTH - 14, y + 5, _short(row.name, MAX_ROW_NAME), "end")
    if row.low is not None and row.high is not None:
        yield f'<path class="whisker k0" d="M{_place(axis, row.low):.1f} {y:.1f}H{_place(axis, row.high):.1f}"/>'
    place = f'cx="{_place(axis, row.value):.1f}" cy="{y:.1f}"'
    yield f'<circle class="dot k0" {place} r="6" data-tip="{escape_html(row.says)}"/>'


def _place(axis: Axis, value: float) -> float:
    return ROW_NAME_WIDTH + (686 - ROW_NAME_WIDTH) * axis.scale(value)


def _short(name: str, most: int = MAX_BAR_NAME) -> str:
    line = sanitize_line(name)
    return line if len(line) <= most else line[: most - 1] + "…"
