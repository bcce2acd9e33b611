"""A table as plain cells, and how numbers look in one. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.display.controls import markdown_text, one_harmless_line
from knowgate.markup import table
from knowgate.statistics import Estimate, Share

NOT_DEFINED = "not defined"
NOTHING = "–"


@dataclass(frozen=True)
class Sheet:
    """A table. A row shorter than the columns is a remark that fills the rest of the line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """The cells under each other, for a terminal or a log; what could steer a terminal is shown as an escape."""
        lines = [[one_harmless_line(cell) for cell in line] for line in (self.columns, *self.rows)]
        whole = [line for line in lines if len(line) == len(self.columns)]
        widths = [max(len(line[place]) for line in whole) for place in range(len(self.columns))]
        padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) for line in lines]
        return "\n".join(line.rstrip() for line in padded)

    def markdown(self) -> str:
        """The table for a Markdown file, with its title above."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)
        return f"### {markdown_text(self.title)}\n\n{table}\n"

    def html(self) -> str:
        """The table for a page or a notebook; every cell is a text."""
        return table(self.columns, self.rows, self.title)


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of two shares, in percentage points; what rounds to nothing has no sign."""
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def number(value: float | None, missing: str = NOTHING) -> str:
    return missing if value is None else f"{round(value, 2) or 0.0:.2f}"  # no negative zero


def with_interval(found: Share, missing: str = NOTHING) -> str:
    if found.value is None or found.low is None or found.high is None:
        return missing
    return f"{percent(found.value)} [{100 * found.low:.1f}, {100 * found.high:.1f}], n = {found.n}"


def markdown_tables(sheets: Sequence[Sheet]) -> str:
    """Tables for a Markdown file."""
    return "\n".join(sheet.markdown() for sheet in sheets)


def share_with_interval(value: Estimate) -> str:
    """A share and its 95 % interval."""
    if value.value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return percent(value.value)
    return f"{percent(value.value)} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def points_with_interval(value: Estimate) -> str:
    """A difference of two shares and its 95 % interval, in percentage points."""
    if value.value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return points(value.value)
    return f"{points(value.value)} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
