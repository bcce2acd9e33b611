"""Tables on a terminal. Columns that do not fit are left out, from the right, and named below the table.

No word and no interval is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from knowgate.core.display import TextTable, sanitize_line

COLUMN_GAP = 2
MIN_TEXT_WIDTH = 30  # longer texts are wrapped, but not to less than this
CELL_UNIT = re.compile(r"\[[^\]]*\]\S*|\S+")  # a word or an interval, which are never broken
INTERVAL_START = re.compile(r" (?=\[[-+\d])")


@dataclass(frozen=True)
class TerminalTable:
    """A table that rich fits to the width of the terminal. Cells are plain text, never markup."""

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table of the columns that fit, then the names of the others."""
        columns = [_Column.measure(self.table, index) for index in range(len(self.table.columns))]
        n_fitting = _count_fitting(columns, options.max_width)
        shown, left_out = columns[:n_fitting], columns[n_fitting:]
        widths = _assign_widths(shown, options.max_width)
        table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False)
        for column, width in zip(shown, widths, strict=True):
            table.add_column(Text(column.name), width=width, overflow="fold")
        for row in self.table.rows:
            cells = zip(row[:n_fitting], widths, strict=False)  # a row may have fewer cells than columns
            table.add_row(*(Text(_break_before_interval(sanitize_line(cell), width)) for cell, width in cells))
        yield table
        if left_out:
            yield Text(f"(no room for: {'; '.join(column.name for column in left_out)})", "dim")


def render_tables(tables: Iterable[TextTable]) -> Group:
    """Render tables below each other, each with its title."""
    parts: list[RenderableType] = []
    for table in tables:
        parts += [Text(sanitize_line(table.title), style="bold"), TerminalTable(table), Text()]
    return Group(*parts)


@dataclass(frozen=True)
class _Column:
    """A table column and its widths in characters.

    Attributes:
        name: Head of the column.
        natural_width: Width without line breaks.
        min_width: Smallest width at which no word is cut.
    """

    name: str
    natural_width: int
    min_width: int

    @classmethod
    def measure(cls, table: TextTable, index: int) -> _Column:
        """Measure the natural and the smallest width of a column. Words and intervals such as [0.7, 0.9] stay whole."""
        name = sanitize_line(table.columns[index])
        cells = [name]
        min_width = 1
        for row in table.rows:
            if index < len(row):
                cells.append(sanitize_line(row[index]))
            # The last cell of a shorter row spans several columns. Only its words have to fit into this column.
            if len(row) == len(table.columns):
                min_width = max(min_width, _measure_wrapped_width(cells[-1]))
        for cell in cells:
            min_width = max(min_width, _measure_max_width(CELL_UNIT.findall(cell)))
        return cls(name, _measure_max_width(cells), min_width)


def _measure_wrapped_width(cell: str) -> int:
    """Return the width of a wrapped cell: long texts wrap at `MIN_TEXT_WIDTH`, an interval goes below its number."""
    if cell_len(cell) > MIN_TEXT_WIDTH:
        return MIN_TEXT_WIDTH
    return _measure_max_width(INTERVAL_START.split(cell))


def _measure_max_width(parts: Sequence[str]) -> int:
    """Return the width of the widest text; 0 without texts."""
    return max(map(cell_len, parts), default=0)


def _count_fitting(columns: Sequence[_Column], width: int) -> int:
    """Return how many columns fit, from the left. The first two are always included."""
    count = len(columns)
    while count > 2 and _sum_widths([column.min_width for column in columns[:count]]) > width:
        count -= 1
    return count


def _sum_widths(widths: Sequence[int]) -> int:
    """Return the width of columns with the gaps between them."""
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _assign_widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Give each column its minimum, and spread the remaining width evenly over columns that need more."""
    widths = [column.min_width for column in columns]
    spare = width - _sum_widths(widths)
    # Each round gives one character to every column that is still too narrow.
    while spare > 0:
        narrow = [index for index, column in enumerate(columns) if widths[index] < column.natural_width]
        if not narrow:
            break
        for index in narrow[:spare]:
            widths[index] += 1
        spare -= len(narrow)
    return widths


def _break_before_interval(cell: str, width: int) -> str:
    """Put an interval below its number if both do not fit on one line."""
    return cell if cell_len(cell) <= width else INTERVAL_START.sub("\n", cell)
