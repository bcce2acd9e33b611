"""Lines and dots in a field, with a legend whose entries show and hide them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knowgate.display import Point, one_harmless_line
from knowgate.markup import escape
from knowgate.report.field import Field, drawing, grid, words

COLOURS = 7  # of the style sheet: k0 to k6
DASHES = 3


@dataclass(frozen=True)
class Line:
    """A line through points. look: a class of the style sheet. mark: a dot on it, with an interval where there is one.

    is_on: drawn from the start; others on demand.
    """

    name: str
    points: Sequence[Point]
    look: str
    mark: Mark | None = None
    is_on: bool = True


@dataclass(frozen=True)
class Mark:
    """A dot and what it says when pointed at. label: words beside it."""

    at: Point
    says: str
    low: float | None = None
    high: float | None = None
    label: str = ""


def look(number: int) -> str:
    """The look of one line among many: colours first, then dashes."""
    return f"k{number % COLOURS} d{number // COLOURS % DASHES}"


def line_plot(field: Field, lines: Sequence[Line], title: str, about: str, marks: Sequence[Mark] = ()) -> str:
    """The picture and its legend."""
    parts = list(grid(field))
    for number, line in enumerate(lines):
        parts += _drawn(field, line, number)
    parts += [part for mark in marks for part in _dot(field, mark, "ink")]
    return drawing(field, parts, title, about) + legend(lines)


def legend(lines: Sequence[Line]) -> str:
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


def _entry(line: Line, number: int) -> str:
    ticked = " checked" if line.is_on else ""
    box = f'<input type="checkbox" data-line="{number}"{ticked}>'
    name = escape(one_harmless_line(line.name))
    return f'<li><label>{box}<i class="swatch {line.look}"></i><bdi>{name}</bdi></label></li>'


def _drawn(field: Field, line: Line, number: int) -> Iterator[str]:
    points = " ".join(f"{field.across(x):.1f},{field.down(y):.1f}" for x, y in line.points)
    off = "" if line.is_on else " off"
    name = escape(one_harmless_line(line.name))
    yield f'<g class="{line.look}{off}" data-line="{number}" data-name="{name}">'
    yield f'<polyline class="line" points="{points}"/>'
    if line.mark:
        yield from _dot(field, line.mark, "")
    yield "</g>"


def _dot(field: Field, mark: Mark, kind: str) -> Iterator[str]:
    x, y = field.across(mark.at.x), field.down(mark.at.y)
    if mark.low is not None and mark.high is not None:
        yield f'<path class="whisker {kind}" d="M{x:.1f} {field.down(mark.low):.1f}V{field.down(mark.high):.1f}"/>'
    yield f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5" data-tip="{escape(mark.says)}"/>'
    if mark.label:
        right = mark.at.x > field.x.low + (field.x.high - field.x.low) / 2
        yield words(
            x if right else x + 10, y + 24 if right else y + 5, mark.label, "end" if right else "start", "label"
        )
