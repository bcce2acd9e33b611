"""Pieces of the page. Everything that comes from a run passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence

from knowgate.evaluate.boundary import change
from knowgate.evaluate.figures import Figure
from knowgate.evaluate.sheets import Sheet, number
from knowgate.labels.rows import LabelRow, Side
from knowgate.types import Passage

LONGEST = 2000  # characters of a text that are shown: twenty questions of ten long passages would make a page too big
PASSAGES = 10


def escape(text: str) -> str:
    """Text for HTML; half a character (a lone surrogate), which no file can hold, is written as an escape."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


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
    place = f'<div class="plot" style="min-height:{figure["layout"]["height"]}px"></div>'
    data_block = f'<script type="application/json">{data}</script>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{place}{data_block}</figure>'


def remark(text: str) -> str:
    return f'<p class="remark">{escape(text)}</p>'


def section(name: str, title: str, intro: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n<p class="intro">{escape(intro)}</p>\n{body}</section>'


def extreme(row: LabelRow) -> str:
    """A question with its answers; opens on a click, its passages on another."""
    rise, benefit = change(row)
    kind = "harmed" if (rise, benefit) < (0, 0) else "helped"
    mark = f'<span class="change {kind}">{rise:+.2f}</span>'
    sides = {"Closed book": row.closed, "Open book": row.open, "MASK": row.mask}
    lines = [("Gold answers", _text(" / ".join(row.answers)) if row.answers else "<em>none</em>")]
    lines += [("Choices", _text(" / ".join(row.choices)))] if row.choices else []
    lines += [(name, _side(side)) for name, side in sides.items() if side is not None]
    facts = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    about = f'<p class="id">{_text(row.id)} · benefit {benefit:+d}</p>'
    summary = f"<summary>{mark} {_text(row.question)}</summary>"
    return f'<details class="question">{summary}{about}<dl>{facts}</dl>{_passages(row.passages)}</details>'


def _side(side: Side) -> str:
    verdict = {True: "right", False: "wrong", None: "not graded"}[side.correct]
    numbers = [f"mastery {number(side.mastery)}", f"certainty {number(side.certainty)}"]
    known = [text for text in numbers if not text.endswith("–")]
    return f'{_text(side.text)} <span class="verdict {verdict.split()[0]}">{", ".join([verdict, *known])}</span>'


def _passages(passages: Sequence[Passage]) -> str:
    if not passages:
        return ""
    items = "".join(f"<li><strong>{_text(p.title or p.id)}</strong> {_text(p.text)}</li>" for p in passages[:PASSAGES])
    more = f"<p>… and {len(passages) - PASSAGES} more</p>" if len(passages) > PASSAGES else ""
    return f"<details><summary>{len(passages)} passages</summary><ol>{items}</ol>{more}</details>"


def _text(text: str) -> str:
    return escape(text if len(text) <= LONGEST else text[:LONGEST] + " … (cut)")


def script(code: str) -> tuple[str, str]:
    """An inline script and the source that allows it, and nothing else, in the page's content security policy."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"<script>{code}</script>", f"'sha256-{digest}'"
