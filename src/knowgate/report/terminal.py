"""Tables on a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from knowgate.display import Sheet, one_harmless_line

NAME = 24


def render(sheet: Sheet) -> Table:
    """Cells are plain text: nothing in a model's name or a question is taken for markup or steers the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = max((len(row[0]) for row in sheet.rows), default=0)  # what a row is about stays whole on a narrow terminal
    for number, column in enumerate(sheet.columns):
        table.add_column(plain(column), overflow="fold", min_width=min(names, NAME) if number == 0 else None)
    for row in sheet.rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def plain(text: str) -> Text:
    return Text(one_harmless_line(text))
