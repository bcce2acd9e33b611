"""Tables on a terminal: as wide as it is, by leaving columns out and naming them. No word and no interval is cut.

Knows cells and widths; not what they mean. Columns to the right go first, so the ones that matter stand left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from knowgate.core.display import TextTable, sanitize_line

COLUMN_GAP = 2  # between columns
MIN_TEXT_WIDTH = 30  # a text is not broken into lines shorter than this
CELL_UNIT = re.compile(r"\[[^\]]*\]\S*|\S+")  # a word, or a whole interval
INTERVAL_START = re.compile(r" (?=\[[-+\d])")


@dataclass(frozen=True)
class TerminalTable:
    """A sheet that takes the width of wherever it is printed."""

    sheet: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [_Column.of(self.sheet, place) for place in range(len(self.sheet.columns))]
        kept = _fitting(columns, options.max_width)
        widths = _widths(columns[:kept], options.max_width)
        table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False)
        for column, width in zip(columns, widths, strict=False):
            table.add_column(make_plain_text(column.name), width=width, overflow="fold")
        for row in self.sheet.rows:
            fitted = zip(row[:kept], widths, strict=False)
            table.add_row(*(Text(_broken(sanitize_line(cell), width)) for cell, width in fitted))
        yield table
        if left_out := [column.name for column in columns[kept:]]:
            yield Text(f"(no room for: {'; '.join(left_out)})", "dim")


@dataclass(frozen=True)
class _Column:
    """natural: width of its longest cell; least: what it must have so that nothing in it is cut."""

    name: str
    natural: int
    least: int

    @classmethod
    def of(cls, sheet: TextTable, place: int) -> _Column:
        name = sanitize_line(sheet.columns[place])
        cells = [sanitize_line(row[place]) for row in sheet.rows if place < len(row)]
        own = [sanitize_line(row[place]) for row in sheet.rows if len(row) == len(sheet.columns)]
        natural = max(map(cell_len, [*cells, name]))
        # a remark that a shorter row ends in takes what room there is, but its words stay whole
        comfortable = [
            MIN_TEXT_WIDTH if cell_len(cell) > MIN_TEXT_WIDTH else _longest(INTERVAL_START.split(cell)) for cell in own
        ]
        return cls(name, natural, max(*comfortable, *map(_unit, [name, *cells]), 1))


def _unit(cell: str) -> int:
    return _longest(CELL_UNIT.findall(cell))


def _longest(parts: Sequence[str]) -> int:
    return max(map(cell_len, parts), default=0)


def _fitting(columns: Sequence[_Column], room: int) -> int:
    """How many columns from the left have room; the first two in any case."""
    kept = len(columns)
    while kept > min(2, len(columns)) and _taken([column.least for column in columns[:kept]]) > room:
        kept -= 1
    return kept


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """What each must have; what is left goes to those that want more, one by one."""
    widths = [column.least for column in columns]
    spare = room - _taken(widths)
    while spare > 0 and (wanting := [i for i, column in enumerate(columns) if widths[i] < column.natural]):
        for place in wanting[:spare]:
            widths[place] += 1
        spare -= len(wanting[:spare])
    return widths


def _broken(cell: str, width: int) -> str:
    """An interval that does not fit beside its number stands below it."""
    return cell if cell_len(cell) <= width else INTERVAL_START.sub("\n", cell)


def render_terminal_table(sheet: TextTable) -> TerminalTable:
    """Cells are plain text: nothing in a model's name or a question is taken for markup or steers the terminal."""
    return TerminalTable(sheet)


def make_plain_text(text: str) -> Text:
    return Text(sanitize_line(text))
