"""Text for HTML. Everything that comes from data passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import html
from collections.abc import Sequence


def escape_html(text: str) -> str:
    """Text for HTML; half a character (a lone surrogate), which no file can hold, is written as an escape."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def render_html_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A plain table whose first column names its rows; a row shorter than the head ends in a remark."""
    title = f"<caption>{escape_html(caption)}</caption>" if caption else ""
    cells = "".join(f'<th scope="col" style="text-align:left">{escape_html(cell)}</th>' for cell in head)
    columns = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    body = "".join(_line(row, len(head)) for row in rows)
    return f"<table>{title}{columns}<tbody>{body}</tbody></table>"


def _line(row: Sequence[str], width: int) -> str:
    first, *rest = row
    cells = [f'<th scope="row" style="text-align:left">{escape_html(first)}</th>']
    cells += [f'<td style="text-align:left">{escape_html(cell)}</td>' for cell in rest]
    if rest and len(row) < width:
        cells[-1] = f'<td style="text-align:left" colspan="{width - len(row) + 1}">{escape_html(rest[-1])}</td>'
    return f"<tr>{''.join(cells)}</tr>"


MAX_LINE_CHARS = 80


def format_verdict(retrieve: bool) -> str:
    return "retrieve" if retrieve else "skip"


def shorten(text: str, width: int = MAX_LINE_CHARS) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def format_count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def render_facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Names and what they are, one below the other."""
    return render_html_table(("", ""), facts)
