"""Output of commands: consoles, JSON lines and tables.

Text is printed literally: markup of rich and control characters in it have no effect. Styles are given separately
(`style=`, or rich's Text), never inside a text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment
from rich.text import Text

from knowgate.core.display import TextTable, sanitize_json, sanitize_line, sanitize_text

PIPED_WIDTH = 220  # width of a table in characters if the output is not a terminal


@dataclass(frozen=True)
class SanitizedRenderable:
    """Wrapper around a rich renderable.

    Control characters in the text are escaped, but control sequences of rich are kept.
    """

    inner: RenderableType  # what is printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rendered segments with their text escaped."""
        for segment in console.render(self.inner, options):
            text = segment.text if segment.control else sanitize_text(segment.text)
            yield Segment(text, segment.style, segment.control)


class SanitizingHook(RenderHook):
    """Hook that escapes control characters in the output of a console. Cursor movements of rich are kept."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [item if isinstance(item, Control) else SanitizedRenderable(item) for item in renderables]


def create_console(*, stderr: bool = False, soft_wrap: bool = True, width: int | None = None) -> Console:
    """Create a console that prints text literally.

    Args:
        stderr: Print to stderr instead of stdout.
        soft_wrap: Let the terminal wrap long lines. Tables need False, to fit their columns to the terminal.
        width: Width in characters. Default: the width of the terminal.
    """
    console = Console(stderr=stderr, soft_wrap=soft_wrap, width=width, markup=False, emoji=False, highlight=False)
    console.push_render_hook(SanitizingHook())
    return console


STDERR_CONSOLE = create_console(stderr=True)


def inform(message: RenderableType = "", style: str | None = None, *, end: str = "\n") -> None:
    """Print a message to stderr. Stdout is for data only."""
    STDERR_CONSOLE.print(message, style=style, end=end)


def create_wide_console(max_width: int = PIPED_WIDTH) -> Console:
    """Create a console for tables, at most `max_width` characters wide."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH  # None means the width of the terminal
    console = create_console(soft_wrap=False, width=width)
    console.width = min(console.width, max_width)
    return console


def print_json(record: Mapping[str, Any]) -> None:
    """Print an object as one line of JSON, safe for terminals."""
    has_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    line = json.dumps(record, ensure_ascii=not has_utf8, allow_nan=False)
    sys.stdout.write(sanitize_json(line) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without a title."""
    print_tables([TextTable("", tuple(columns), tuple(map(tuple, rows)))])


def print_tables(tables: Sequence[TextTable]) -> None:
    """Print each table below its title."""
    from knowgate.evaluation.report.terminal import TerminalTable

    console = create_wide_console()
    for table in tables:
        if table.title:
            console.print(Text(sanitize_line(table.title), "bold"))
        console.print(TerminalTable(table))


def print_text(text: str) -> None:
    """Print a paragraph, wrapped between words on a terminal and on one line elsewhere."""
    create_wide_console().print(Text(sanitize_line(text)), soft_wrap=not sys.stdout.isatty())
