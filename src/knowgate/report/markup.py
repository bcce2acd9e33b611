"""Pieces of the page. Everything that comes from a run passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

from knowgate.display import Sheet
from knowgate.markup import escape
from knowgate.report.charts import Figure


def table(sheet: Sheet, how: Mapping[str, str] | None = None) -> str:
    """A table that scrolls sideways by itself on a narrow screen. how: columns whose head links to its definition."""
    head = "".join(f'<th scope="col">{_head(column, how or {})}</th>' for column in sheet.columns)
    body = "\n".join(_line(row, len(sheet.columns)) for row in sheet.rows)
    caption = f"<caption>{escape(sheet.title)}</caption>"
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _head(column: str, how: Mapping[str, str]) -> str:
    if column not in how:
        return escape(column)
    return f'<a href="#{anchor(column)}" title="{escape(how[column])}">{escape(column)}</a>'


def anchor(name: str) -> str:
    """Where a definition stands in the page."""
    return "how-" + "".join(char if char.isalnum() else "-" for char in name)


def definitions(title: str, how: Mapping[str, str]) -> str:
    """Names and what they mean, each a place that can be linked to."""
    rows = "".join(
        f'<tr id="{anchor(name)}"><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in how.items()
    )
    head = '<thead><tr><th scope="col">number</th><th scope="col">how it is computed</th></tr></thead>'
    return f'<div class="scroll"><table><caption>{escape(title)}</caption>{head}<tbody>{rows}</tbody></table></div>'


def _line(row: Sequence[str], width: int) -> str:
    first, *rest = row
    cells = [f'<th scope="row">{escape(first)}</th>', *(f"<td>{_unbroken(cell)}</td>" for cell in rest)]
    if len(row) < width:  # a remark
        cells[-1] = f'<td class="remark" colspan="{width - len(row) + 1}">{escape(row[-1])}</td>'
    return f"<tr>{''.join(cells)}</tr>"


def _unbroken(cell: str) -> str:
    """A cell whose percent signs stay with their numbers."""
    return escape(cell).replace(" %", "&nbsp;%")


def chart(figure: Figure, title: str) -> str:
    """A place for a chart with its data inside; `<` is written so that no text can end the script element."""
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    plot = f'<div class="plot" style="min-height:{figure["layout"]["height"]}px"></div>'
    data_block = f'<script type="application/json">{data}</script>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{plot}{data_block}</figure>'


def remark(text: str) -> str:
    return f'<p class="remark">{escape(text)}</p>'


def section(name: str, title: str, intro: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n<p class="intro">{escape(intro)}</p>\n{body}</section>'


def script(code: str) -> tuple[str, str]:
    """An inline script and the source that allows it, and nothing else, in the page's content security policy."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"<script>{code}</script>", f"'sha256-{digest}'"
