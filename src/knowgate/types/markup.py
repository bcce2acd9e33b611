"""HTML for notebooks and reports. All text that comes from data is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

MAX_LINE_CHARS = 80


def escape_html(text: str) -> str:
    """Escape text for HTML. Lone surrogates, which UTF-8 cannot encode, become backslash escapes."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def render_html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Render a plain HTML table. The first cell of a row is its header.

    Args:
        columns: Column titles; no header row is written if all are empty.
        rows: Cells of each row. If a row has too few cells, its last cell spans the remaining columns.
        caption: Title of the table.
    """
    title = f"<caption>{escape_html(caption)}</caption>" if caption else ""
    cells = "".join(f'<th scope="col" style="text-align:left">{escape_html(column)}</th>' for column in columns)
    header = f"<thead><tr>{cells}</tr></thead>" if any(columns) else ""
    body = "".join(_render_row(row, len(columns)) for row in rows)
    return f"<table>{title}{header}<tbody>{body}</tbody></table>"


def _render_row(row: Sequence[str], width: int) -> str:
    """Render one row of an HTML table of `width` columns."""
    first, *others = row
    cells = [f'<th scope="row" style="text-align:left">{escape_html(first)}</th>']
    cells += [f'<td style="text-align:left">{escape_html(cell)}</td>' for cell in others]
    if others and len(row) < width:
        span = width - len(row) + 1  # the last cell fills its own column and all missing ones
        cells[-1] = f'<td style="text-align:left" colspan="{span}">{escape_html(others[-1])}</td>'
    return f"<tr>{''.join(cells)}</tr>"


def format_verdict(retrieve: bool) -> str:
    """Return the word for a decision: 'retrieve', or 'skip' if nothing is retrieved."""
    return "retrieve" if retrieve else "skip"


def shorten(text: str, width: int = MAX_LINE_CHARS) -> str:
    """Put text on one line and cut it to `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def format_count(n: int, noun: str) -> str:
    """Format a number with its noun, as in '1 passage' or '3 passages'."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
