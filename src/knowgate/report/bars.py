"""Bars, side by side or stacked, and rows of dots with their intervals. A legend beside them says what colours mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knowgate.display import Axis, one_harmless_line
from knowgate.markup import escape
from knowgate.report.field import LEFT, RIGHT, Field, drawing, grid, words

LONGEST = 22  # characters of a name under a bar
LONGER = 28  # of one beside a row
THIN = 0.07  # share of a stack in which a number has no room
ROW = 34  # height of a row of dots
BESIDE = 300  # room for the names of rows


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
class Group:
    """Bars that belong together, and what stands under them."""

    name: str
    bars: Sequence[Bar]
    note: str = ""


def bar_chart(field: Field, groups: Sequence[Group], title: str, about: str, *, is_stacked: bool = False) -> str:
    parts = list(grid(field, names=[group.name for group in groups]))
    width = (field.width - LEFT - RIGHT) / max(1, len(groups))
    for number, group in enumerate(groups):
        start = LEFT + number * width
        parts += _stack(field, group, start, width) if is_stacked else _beside(field, group, start, width)
        parts += [words(start + width / 2, field.foot + 20, _short(group.name), "middle")]
        parts += [words(start + width / 2, field.foot + 36, group.note, "middle")] if group.note else []
    return drawing(field, parts, title, about)


def key(names: Sequence[tuple[str, str]]) -> str:
    """What looks mean: (name, look)."""
    items = "".join(f'<li><i class="swatch box {look}"></i>{escape(name)}</li>' for name, look in names)
    return f'<ul class="legend">{items}</ul>'


def _stack(field: Field, group: Group, start: float, width: float) -> Iterator[str]:
    base = 0.0
    for bar in group.bars:
        if bar.value:
            yield _box(field, bar, start + width * 0.1, width * 0.8, base, base + bar.value)
            if bar.label and bar.value > THIN:
                yield words(start + width / 2, field.down(base + bar.value / 2) + 5, bar.label, "middle", "inside")
            base += bar.value


def _beside(field: Field, group: Group, start: float, width: float) -> Iterator[str]:
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
        yield words(x + each / 2, top - 7, bar.label, "middle", "label")


def _box(field: Field, bar: Bar, x: float, width: float, low: float, high: float) -> str:
    top, bottom = field.down(high), field.down(low)
    place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    return f'<rect class="bar {bar.look}" {place} data-tip="{escape(bar.says)}"/>'


@dataclass(frozen=True)
class Row:
    """A name and a value with its interval."""

    name: str
    value: float
    low: float | None
    high: float | None
    says: str


def dot_rows(rows: Sequence[Row], title: str, about: str, axis: str) -> str:
    """Differences under each other, with a line at nothing; one picture says where they lie."""
    ends = [0.0, *(value for row in rows for value in (row.value, row.low, row.high) if value is not None)]
    room = (max(ends) - min(ends)) * 0.06 or 0.01
    x = Axis(axis, min(ends) - room, max(ends) + room)
    height = ROW * len(rows) + 56
    field = Field(x, Axis("", 0, 1), width=720, height=height)
    zero = _place(x, 0.0)
    parts = [f'<path class="axis" d="M{zero:.1f} 8V{height - 44}"/>']
    for number, row in enumerate(rows):
        parts += _row(x, row, 8 + ROW * (number + 0.5))
    for value in sorted({min(ends), 0.0, max(ends)}):
        parts.append(words(_place(x, value), height - 26, f"{100 * value:+.1f}" if value else "0", "middle"))
    parts.append(words((BESIDE + 686) / 2, height - 6, axis, "middle", "title"))
    return drawing(field, parts, title, about, kind="rows")


def _row(axis: Axis, row: Row, y: float) -> Iterator[str]:
    yield words(BESIDE - 14, y + 5, _short(row.name, LONGER), "end")
    if row.low is not None and row.high is not None:
        yield f'<path class="whisker k0" d="M{_place(axis, row.low):.1f} {y:.1f}H{_place(axis, row.high):.1f}"/>'
    place = f'cx="{_place(axis, row.value):.1f}" cy="{y:.1f}"'
    yield f'<circle class="dot k0" {place} r="6" data-tip="{escape(row.says)}"/>'


def _place(axis: Axis, value: float) -> float:
    return BESIDE + (686 - BESIDE) * axis.share(value)


def _short(name: str, most: int = LONGEST) -> str:
    line = one_harmless_line(name)
    return line if len(line) <= most else line[: most - 1] + "…"
