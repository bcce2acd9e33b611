"""Where commands print. Texts are shown as they stand: no markup, no emoji by name, no control sequences in them.

Style is given beside the text (`style=`, or rich's Text), never inside it. Data goes to stdout, words to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment
from rich.text import Text

from knowgate.core.display import TextTable, sanitize_json, sanitize_line, sanitize_text
from knowgate.evaluation.report.terminal import TerminalTable

TRUSTED_RENDERABLES = (Control,)  # how a progress bar moves


@dataclass(frozen=True)
class SanitizedRenderable:
    """What is printed, with the texts in it made harmless; rich's own control sequences are no texts."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(sanitize_text(segment.text), segment.style)


class SanitizingHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [one if isinstance(one, TRUSTED_RENDERABLES) else SanitizedRenderable(one) for one in renderables]


def create_console(*, stderr: bool = False, soft_wrap: bool = True, width: int | None = None) -> Console:
    """soft_wrap: long lines are left to the terminal; tables want False, to fit their columns into it."""
    console = Console(stderr=stderr, soft_wrap=soft_wrap, width=width, markup=False, emoji=False, highlight=False)
    console.push_render_hook(SanitizingHook())
    return console


STDERR_CONSOLE = create_console(stderr=True)


def print_json(record: Mapping[str, Any]) -> None:
    """One line; escapes where the terminal has no UTF-8, which JSON is otherwise written in. A text is read back as it
    was, though it cannot steer the terminal."""
    has_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    line = json.dumps(record, ensure_ascii=not has_utf8, allow_nan=False)
    sys.stdout.write(sanitize_json(line) + "\n")
    sys.stdout.flush()


def print_page_location(page: Path) -> None:
    """Where a page was written, and how big it is."""
    size = page.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    STDERR_CONSOLE.print(f"Page: {page.resolve()} ({shown}, readable without network)")


PIPED_WIDTH = 220  # columns


def create_wide_console() -> Console:
    """Room for all columns where the output is not a terminal of a given width."""
    return create_console(soft_wrap=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_tables([TextTable("", tuple(columns), tuple(map(tuple, rows)))])


def print_tables(sheets: Sequence[TextTable]) -> None:
    """Each below its title."""
    console = create_wide_console()
    for sheet in sheets:
        if sheet.title:
            console.print(Text(sanitize_line(sheet.title), "bold"))
        console.print(TerminalTable(sheet))


def print_text(words: str) -> None:
    """Within the lines of a terminal, broken between words; elsewhere one line."""
    create_wide_console().print(Text(sanitize_line(words)), soft_wrap=not sys.stdout.isatty())
