"""SVG charts of report pages: lines and bars in a plot area. Colors and fonts come from the style sheet.

A chart is as wide as its container. On narrow screens the style sheet enlarges its texts, so margins are generous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knowgate.core.chart import Axis, ChartPoint
from knowgate.core.display import sanitize_line
from knowgate.types.markup import escape_html, shorten

TICK_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
MAX_TICKS = 6
LEFT, RIGHT, TOP, BOTTOM = 78, 34, 18, 62  # margins
CHART_WIDTH, CHART_HEIGHT = 720, 400
SMALL_WIDTH, SMALL_HEIGHT = 560, 360
COLOR_COUNT = 7  # classes k0 to k6 of the style sheet
DASH_COUNT = 3
MAX_BAR_NAME = 22  # characters
MIN_LABELED_SHARE = 0.07  # a thinner part of a stacked bar has no room for its label


@dataclass(frozen=True)
class PlotArea:
    """Axes and size of a chart.

    Attributes:
        x: The horizontal axis.
        y: The vertical axis.
        width: Width of the chart in pixels, with its margins.
        height: Height of the chart in pixels, with its margins.
        x_is_share: Whether numbers along the x axis are shown in percent.
    """

    x: Axis
    y: Axis
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT
    x_is_share: bool = True

    def get_x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        return LEFT + (self.width - LEFT - RIGHT) * self.x.scale(value)

    def get_y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return TOP + (self.height - TOP - BOTTOM) * (1 - self.y.scale(value))

    @property
    def bottom(self) -> float:
        """Y coordinate of the x axis."""
        return self.height - BOTTOM


def render_svg(area: PlotArea, parts: Sequence[str], title: str, description: str) -> str:
    """Render an SVG element that a screen reader reads as one image.

    Args:
        area: Axes and size.
        parts: SVG elements.
        title: Title for screen readers.
        description: What the chart shows, in words.
    """
    # The script of the page reads the scale, to show the values under the pointer.
    scale = {
        "x": [LEFT, area.width - RIGHT, area.x.low, area.x.high],
        "y": [area.bottom, TOP, area.y.low, area.y.high],
        "shares": [area.x_is_share, True],  # numbers along the y axis are always shown in percent
        "names": [area.x.title, area.y.title],
    }
    return (
        f'<svg class="plot" role="img" aria-label="{escape_html(title)}" viewBox="0 0 {area.width} '
        f'{area.height}" data-scale="{escape_html(json.dumps(scale))}"><desc>{escape_html(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def draw_grid(area: PlotArea, *, with_x_ticks: bool = True) -> Iterator[str]:
    """Draw grid lines, ticks and axis titles."""
    for value in compute_ticks(area.y):
        y = area.get_y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{area.width - RIGHT}"/>'
        yield draw_text(LEFT - 8, y + 4.5, format_tick(value), "end")
    if with_x_ticks:
        for value in compute_ticks(area.x):
            yield draw_text(area.get_x(value), area.bottom + 24, format_tick(value, is_share=area.x_is_share), "middle")
    yield f'<path class="axis" d="M{LEFT} {area.bottom}H{area.width - RIGHT}"/>'
    yield draw_text((LEFT + area.width - RIGHT) / 2, area.height - 10, area.x.title, "middle", "title")
    yield draw_text(16, (TOP + area.bottom) / 2, area.y.title, "middle", "title side", is_vertical=True)


def compute_ticks(axis: Axis) -> list[float]:
    """Return round numbers along an axis. Example: 0.5, 0.55, ..., 0.7 for an axis from 0.48 to 0.71."""
    tolerance = 1e-9  # absorbs rounding errors
    span = axis.high - axis.low
    fitting_steps = [step for step in TICK_STEPS if span / step <= MAX_TICKS - 1 + tolerance]
    step = fitting_steps[0] if fitting_steps else span / (MAX_TICKS - 1)
    # Ticks are multiples of the step: the first one on the axis, the last one, and all between them.
    first = math.ceil(axis.low / step - tolerance)
    last = math.floor(axis.high / step + tolerance)
    return [round(number * step, 6) for number in range(first, last + 1)]


def draw_text(x: float, y: float, text: str, anchor: str, css_class: str = "", *, is_vertical: bool = False) -> str:
    """Draw one line of escaped text."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if is_vertical else ""
    attribute = f' class="{css_class}"' if css_class else ""
    line = escape_html(sanitize_line(text))
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{rotation}>{line}</text>'


def format_tick(value: float, *, is_share: bool = True) -> str:
    """Format a number along an axis."""
    return f"{100 * value:.3g} %" if is_share else f"{value:g}"


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlotMark:
    """A dot with an optional interval.

    Attributes:
        at: Position of the dot.
        tooltip: Text shown when the dot is pointed at.
        low: Lower end of the interval; None for no interval.
        high: Upper end of the interval.
        label: Text beside the dot.
    """

    at: ChartPoint
    tooltip: str
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class PlotLine:
    """A line through points.

    Attributes:
        name: Name in the legend.
        points: The points.
        css_class: Class of the style sheet that colors it.
        mark: A dot on the line.
        is_visible: Whether it is visible before the reader selects it in the legend.
    """

    name: str
    points: Sequence[ChartPoint]
    css_class: str
    mark: PlotMark | None = None
    is_visible: bool = True


def pick_line_style(number: int) -> str:
    """Return the class of one line among many: colors vary first, then dashes."""
    return f"k{number % COLOR_COUNT} d{number // COLOR_COUNT % DASH_COUNT}"


def draw_line_plot(
    area: PlotArea, lines: Sequence[PlotLine], title: str, description: str, marks: Sequence[PlotMark] = ()
) -> str:
    """Draw lines and dots, with a legend that shows and hides the lines."""
    parts = list(draw_grid(area))
    for number, line in enumerate(lines):
        parts += _draw_line(area, line, number)
    for mark in marks:
        parts += _draw_mark(area, mark, "ink")
    return render_svg(area, parts, title, description) + build_legend(lines)


def build_legend(lines: Sequence[PlotLine]) -> str:
    """Build the legend as HTML; entries of hidden lines are in a collapsed list."""
    visible = [_build_legend_entry(line, number) for number, line in enumerate(lines) if line.is_visible]
    hidden = [_build_legend_entry(line, number) for number, line in enumerate(lines) if not line.is_visible]
    legend = f'<ul class="legend">{"".join(visible)}</ul>'
    if not hidden:
        return legend
    summary = f"<summary>Show others in the picture ({len(hidden)})</summary>"
    return f'{legend}<details class="more">{summary}<ul class="legend">{"".join(hidden)}</ul></details>'


def _build_legend_entry(line: PlotLine, number: int) -> str:
    """Build the legend entry of a line: checkbox, color and name."""
    checked = " checked" if line.is_visible else ""
    box = f'<input type="checkbox" data-line="{number}"{checked}>'
    name = escape_html(sanitize_line(line.name))
    return f'<li><label>{box}<i class="swatch {line.css_class}"></i><bdi>{name}</bdi></label></li>'


def _draw_line(area: PlotArea, line: PlotLine, number: int) -> Iterator[str]:
    """Draw a line and its dot as a group. The checkbox with the same number hides the group."""
    points = " ".join(f"{area.get_x(x):.1f},{area.get_y(y):.1f}" for x, y in line.points)
    hidden = "" if line.is_visible else " off"
    name = escape_html(sanitize_line(line.name))
    yield f'<g class="{line.css_class}{hidden}" data-line="{number}" data-name="{name}">'
    yield f'<polyline class="line" points="{points}"/>'
    if line.mark:
        yield from _draw_mark(area, line.mark, "")
    yield "</g>"


def _draw_mark(area: PlotArea, mark: PlotMark, css_class: str) -> Iterator[str]:
    """Draw a dot with its interval, and its label where it has room."""
    x, y = area.get_x(mark.at.x), area.get_y(mark.at.y)
    if mark.low is not None and mark.high is not None:
        interval = f"M{x:.1f} {area.get_y(mark.low):.1f}V{area.get_y(mark.high):.1f}"
        yield f'<path class="whisker {css_class}" d="{interval}"/>'
    tooltip = escape_html(mark.tooltip)
    yield f'<circle class="dot {css_class}" cx="{x:.1f}" cy="{y:.1f}" r="5" data-tip="{tooltip}"/>'
    if mark.label:
        is_in_right_half = mark.at.x > area.x.low + (area.x.high - area.x.low) / 2
        place = (x, y + 24, mark.label, "end") if is_in_right_half else (x + 10, y + 5, mark.label, "start")
        yield draw_text(*place, "label")


# --- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A bar with an optional interval.

    Attributes:
        value: Height; None for no bar.
        css_class: Class of the style sheet that colors it.
        tooltip: Text shown when the bar is pointed at.
        low: Lower end of the interval; None for no interval.
        high: Upper end of the interval.
        label: Text above the bar, or inside a stacked one.
    """

    value: float | None
    css_class: str
    tooltip: str = ""
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class BarGroup:
    """Bars that belong together.

    Attributes:
        name: Text below the bars.
        bars: The bars.
        note: Text below the name.
    """

    name: str
    bars: Sequence[Bar]
    note: str = ""


def draw_bar_chart(area: PlotArea, groups: Sequence[BarGroup], title: str, *, is_stacked: bool = False) -> str:
    """Draw groups of bars, stacked or side by side. Tooltips describe the chart to screen readers."""
    parts = list(draw_grid(area, with_x_ticks=False))
    group_width = (area.width - LEFT - RIGHT) / max(1, len(groups))
    draw_group = _draw_stack if is_stacked else _draw_bars
    for number, group in enumerate(groups):
        start = LEFT + number * group_width
        parts += draw_group(area, group, start, group_width)
        name, middle = shorten(sanitize_line(group.name), MAX_BAR_NAME), start + group_width / 2
        parts.append(draw_text(middle, area.bottom + 20, name, "middle"))
        if group.note:
            parts.append(draw_text(middle, area.bottom + 36, group.note, "middle"))
    description = "; ".join(f"{group.name}, {bar.tooltip}" for group in groups for bar in group.bars)
    return render_svg(area, parts, title, description)


def build_color_key(names: Sequence[tuple[str, str]]) -> str:
    """Build a legend of (name, class) pairs."""
    items = "".join(f'<li><i class="swatch box {css_class}"></i>{escape_html(name)}</li>' for name, css_class in names)
    return f'<ul class="legend">{items}</ul>'


def _draw_stack(area: PlotArea, group: BarGroup, start: float, width: float) -> Iterator[str]:
    """Draw the bars of a group on top of each other, from x coordinate `start` over `width`."""
    base = 0.0  # where the next bar begins
    for bar in group.bars:
        if bar.value:
            # A tenth of the width stays free on each side.
            yield _draw_box(area, bar, start + width * 0.1, width * 0.8, base, base + bar.value)
            if bar.label and bar.value > MIN_LABELED_SHARE:
                middle = area.get_y(base + bar.value / 2)
                yield draw_text(start + width / 2, middle + 5, bar.label, "middle", "inside")
            base += bar.value


def _draw_bars(area: PlotArea, group: BarGroup, start: float, width: float) -> Iterator[str]:
    """Draw the bars of a group side by side, centered from x coordinate `start` over `width`."""
    bar_width = min(width * 0.84 / max(1, len(group.bars)), 90)
    first = start + (width - bar_width * len(group.bars)) / 2
    for number, bar in enumerate(group.bars):
        if bar.value is None:
            continue
        x = first + number * bar_width
        yield _draw_box(area, bar, x + 2, bar_width - 4, 0.0, bar.value)
        if bar.low is not None and bar.high is not None:
            interval = f"{area.get_y(bar.low):.1f}V{area.get_y(bar.high):.1f}"
            yield f'<path class="whisker ink" d="M{x + bar_width / 2:.1f} {interval}"/>'
        top = bar.value if bar.high is None else bar.high  # the label is above the bar and its interval
        yield draw_text(x + bar_width / 2, area.get_y(top) - 7, bar.label, "middle", "label")


def _draw_box(area: PlotArea, bar: Bar, x: float, width: float, low: float, high: float) -> str:
    """Draw the rectangle of a bar from value `low` to value `high`."""
    top, bottom = area.get_y(high), area.get_y(low)
    position = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    return f'<rect class="bar {bar.css_class}" {position} data-tip="{escape_html(bar.tooltip)}"/>'
