"""Tables and longer texts on stdout: as wide as the terminal, and with all columns where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from knowgate.cli.console import plain_console
from knowgate.display import Sheet, one_harmless_line
from knowgate.report import render

PIPED = 220  # columns


def wide_console() -> Console:
    """Room for all columns where the output is not a terminal of a given width."""
    return plain_console(soft_wrap=False, width=None if sys.stdout.isatty() else PIPED)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_sheets([Sheet("", tuple(columns), tuple(map(tuple, rows)))])


def print_sheets(sheets: Sequence[Sheet]) -> None:
    """Each below its title."""
    console = wide_console()
    for sheet in sheets:
        if sheet.title:
            console.print(Text(one_harmless_line(sheet.title), "bold"))
        console.print(render(sheet))


def print_text(words: str) -> None:
    """Within the lines of a terminal, broken between words; elsewhere one line."""
    wide_console().print(Text(one_harmless_line(words)), soft_wrap=not sys.stdout.isatty())
