"""Text for HTML. Everything that comes from data passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import html
from collections.abc import Sequence


def escape(text: str) -> str:
    """Text for HTML; half a character (a lone surrogate), which no file can hold, is written as an escape."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A plain table whose first column names its rows; a row shorter than the head ends in a remark."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    cells = "".join(f'<th scope="col" style="text-align:left">{escape(cell)}</th>' for cell in head)
    columns = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    body = "".join(_line(row, len(head)) for row in rows)
    return f"<table>{title}{columns}<tbody>{body}</tbody></table>"


def _line(row: Sequence[str], width: int) -> str:
    first, *rest = row
    cells = [f'<th scope="row" style="text-align:left">{escape(first)}</th>']
    cells += [f'<td style="text-align:left">{escape(cell)}</td>' for cell in rest]
    if rest and len(row) < width:
        cells[-1] = f'<td style="text-align:left" colspan="{width - len(row) + 1}">{escape(rest[-1])}</td>'
    return f"<tr>{''.join(cells)}</tr>"
