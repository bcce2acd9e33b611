"""Pieces of the page. Everything that comes from a run passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence

from knowgate.display import Sheet
from knowgate.markup import escape


def text(words: str) -> str:
    """A text of unknown direction: right-to-left letters in it do not turn what stands around."""
    return f'<bdi dir="auto">{escape(words)}</bdi>'


def table(sheet: Sheet, how: Mapping[str, str] | None = None, kind: str = "") -> str:
    """A table that scrolls sideways by itself on a narrow screen. how: columns whose head links to its definition."""
    head = "".join(_head(column, how or {}) for column in sheet.columns)
    body = "\n".join(_line(row, len(sheet.columns)) for row in sheet.rows)
    return _scrolling(f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>", sheet.title, kind)


def wide_table(sheet: Sheet, how: Mapping[str, str], chosen: Collection[str] = ()) -> str:
    """Many columns beside a first one that stays; rows can be sorted and filtered, the chosen ones stand out."""
    head = "".join(f'<th scope="col" title="{escape(how.get(one, one))}">{escape(one)}</th>' for one in sheet.columns)
    body = "\n".join(_line(row, len(sheet.columns), is_chosen=row[0] in chosen) for row in sheet.rows)
    return _scrolling(f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>", sheet.title, "sortable wide")


def _scrolling(inside: str, title: str, kind: str) -> str:
    """The keyboard reaches what scrolls."""
    named = f' class="{kind}"' if kind else ""
    place = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
    return f"{place}<table{named}><caption>{escape(title)}</caption>{inside}</table></div>"


def _head(column: str, how: Mapping[str, str]) -> str:
    if not column:
        return "<td></td>"
    if column not in how:
        return f'<th scope="col">{escape(column)}</th>'
    return f'<th scope="col"><a href="#{anchor(column)}" title="{escape(how[column])}">{escape(column)}</a></th>'


def anchor(name: str) -> str:
    """Where a definition stands in the page."""
    return "how-" + "".join(char if char.isalnum() else "-" for char in name)


def definitions(title: str, how: Mapping[str, str]) -> str:
    """Names and what they mean, each a place that can be linked to."""
    rows = "".join(
        f'<tr id="{anchor(name)}"><th scope="row">{escape(name)}</th><td>{escape(words)}</td></tr>'
        for name, words in how.items()
    )
    head = '<thead><tr><th scope="col">number</th><th scope="col">how it is computed</th></tr></thead>'
    return _scrolling(f"{head}<tbody>{rows}</tbody>", title, "text")


def _line(row: Sequence[str], width: int, *, is_chosen: bool = False) -> str:
    first, *rest = row
    name = f'<th scope="row">{text(first)}</th>' if first else "<td></td>"
    cells = [name, *(f"<td>{escape(cell)}</td>" for cell in rest)]
    if len(row) < width:  # a remark
        cells[-1] = f'<td class="remark" colspan="{width - len(row) + 1}">{escape(row[-1])}</td>'
    mark = ' class="chosen"' if is_chosen else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def figure(drawn: str, title: str) -> str:
    """A picture under its title."""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{drawn}</figure>'


def pair(figures: Sequence[str]) -> str:
    """Pictures side by side where there is room."""
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def remark(words: str) -> str:
    return f'<p class="remark">{escape(words)}</p>'


def cautions(sentences: Sequence[str]) -> str:
    """What must be read before any figure; '' where there is nothing to beware of."""
    said = "".join(f"<p>{escape(one)}</p>" for one in sentences)
    return f'<section class="caution" id="caution" aria-label="Beware">{said}</section>' if said else ""


def section(name: str, title: str, intro: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n<p class="intro">{escape(intro)}</p>\n{body}</section>'


def folded(name: str, title: str, intro: str, parts: Sequence[str], hint: str = "") -> str:
    """A section that opens on demand; hint: a few words on what is inside."""
    shown = f"<span>{escape(hint)}</span>" if hint else ""
    head = f"<summary><h2>{escape(title)}</h2>{shown}</summary>"
    body = "\n".join(parts)
    return f'<details class="fold" id="{name}">{head}\n<p class="intro">{escape(intro)}</p>\n{body}</details>'


def script(code: str) -> tuple[str, str]:
    """An inline script and the source that allows it, and nothing else, in the page's content security policy."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"<script>{code}</script>", f"'sha256-{digest}'"
