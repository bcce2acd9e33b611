"""The field of a chart: axes, grid and words around it, as SVG. Colours and letters are the style sheet's.

A chart is as wide as its place; on a narrow screen the style sheet makes its letters larger, so margins are roomy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knowgate.display import Axis, one_harmless_line
from knowgate.markup import escape

STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)  # between numbers along an axis
MOST_TICKS = 6
LEFT, RIGHT, TOP, BOTTOM = 78, 34, 18, 62
WIDTH, HEIGHT = 720, 400


@dataclass(frozen=True)
class Field:
    """Where values lie. x_share, y_share: numbers along that axis are written in percent."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    x_share: bool = True
    y_share: bool = True

    def across(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * self.x.share(value)

    def down(self, value: float) -> float:
        return TOP + (self.height - TOP - BOTTOM) * (1 - self.y.share(value))

    @property
    def foot(self) -> float:
        return self.height - BOTTOM


def drawing(field: Field, parts: Sequence[str], title: str, about: str, kind: str = "plot") -> str:
    """An SVG element that a screen reader reads as one picture."""
    scale = {
        "x": [LEFT, field.width - RIGHT, field.x.low, field.x.high],
        "y": [field.foot, TOP, field.y.low, field.y.high],
        "shares": [field.x_share, field.y_share],
        "names": [field.x.title, field.y.title],
    }
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape(title)}" viewBox="0 0 {field.width} {field.height}" '
        f'data-scale="{escape(json.dumps(scale))}"><desc>{escape(about)}</desc>{"".join(parts)}</svg>'
    )


def grid(field: Field, *, names: Sequence[str] | None = None) -> Iterator[str]:
    """Lines and numbers; names: of places along the foot, instead of numbers."""
    for value in ticks(field.y):
        y = field.down(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{field.width - RIGHT}"/>'
        yield words(LEFT - 8, y + 4.5, shown(value, is_share=field.y_share), "end")
    if names is None:
        for value in ticks(field.x):
            yield words(field.across(value), field.foot + 24, shown(value, is_share=field.x_share), "middle")
    yield f'<path class="axis" d="M{LEFT} {field.foot}H{field.width - RIGHT}"/>'
    middle = (TOP + field.foot) / 2
    yield words((LEFT + field.width - RIGHT) / 2, field.height - 10, field.x.title, "middle", "title")
    yield words(16, middle, field.y.title, "middle", "title side", turned=True)


def ticks(axis: Axis) -> list[float]:
    """Round numbers along an axis, six at most."""
    span = axis.high - axis.low
    step = next((one for one in STEPS if span / one <= MOST_TICKS - 1 + 1e-9), span / (MOST_TICKS - 1))
    first = math.ceil(axis.low / step - 1e-9)
    return [round(number * step, 6) for number in range(first, math.floor(axis.high / step + 1e-9) + 1)]


def words(x: float, y: float, text: str, anchor: str, kind: str = "", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    name = f' class="{kind}"' if kind else ""
    line = escape(one_harmless_line(text))
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{line}</text>'


def shown(value: float, *, is_share: bool = True) -> str:
    return f"{100 * value:.3g} %" if is_share else f"{value:g}"
