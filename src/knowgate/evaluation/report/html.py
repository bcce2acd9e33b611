"""Pieces of the page. Everything that comes from a run passes `escape`: a hostile text stays a text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources

from knowgate.core import VERSION
from knowgate.core.display import TextTable, format_number
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.evaluation.boundary import measure_retrieval_change
from knowgate.evaluation.report import html as markup
from knowgate.types import Passage
from knowgate.types.markup import escape_html


def render_text(words: str) -> str:
    """A text of unknown direction: right-to-left letters in it do not turn what stands around."""
    return f'<bdi dir="auto">{escape_html(words)}</bdi>'


def render_table(sheet: TextTable, how: Mapping[str, str] | None = None, kind: str = "") -> str:
    """A table that scrolls sideways by itself on a narrow screen. how: columns whose head links to its definition."""
    head = "".join(_head(column, how or {}) for column in sheet.columns)
    body = "\n".join(_line(row, len(sheet.columns)) for row in sheet.rows)
    return _scrolling(f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>", sheet.title, kind)


def render_wide_table(sheet: TextTable, how: Mapping[str, str], chosen: Collection[str] = ()) -> str:
    """Many columns beside a first one that stays; rows can be sorted and filtered, the chosen ones stand out."""
    head = "".join(
        f'<th scope="col" title="{escape_html(how.get(one, one))}">{escape_html(one)}</th>' for one in sheet.columns
    )
    body = "\n".join(_line(row, len(sheet.columns), is_chosen=row[0] in chosen) for row in sheet.rows)
    return _scrolling(f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>", sheet.title, "sortable wide")


def _scrolling(inside: str, title: str, kind: str) -> str:
    """The keyboard reaches what scrolls."""
    named = f' class="{kind}"' if kind else ""
    place = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_html(title)}">'
    return f"{place}<table{named}><caption>{escape_html(title)}</caption>{inside}</table></div>"


def _head(column: str, how: Mapping[str, str]) -> str:
    if not column:
        return "<td></td>"
    if column not in how:
        return f'<th scope="col">{escape_html(column)}</th>'
    return f'<th scope="col"><a href="#{make_anchor(column)}" title="{escape_html(how[column])}">{escape_html(column)}</a></th>'


def make_anchor(name: str) -> str:
    """Where a definition stands in the page."""
    return "how-" + "".join(char if char.isalnum() else "-" for char in name)


def render_definitions(title: str, how: Mapping[str, str]) -> str:
    """Names and what they mean, each a place that can be linked to."""
    rows = "".join(
        f'<tr id="{make_anchor(name)}"><th scope="row">{escape_html(name)}</th><td>{escape_html(words)}</td></tr>'
        for name, words in how.items()
    )
    head = '<thead><tr><th scope="col">number</th><th scope="col">how it is computed</th></tr></thead>'
    return _scrolling(f"{head}<tbody>{rows}</tbody>", title, "text")


def _line(row: Sequence[str], width: int, *, is_chosen: bool = False) -> str:
    first, *rest = row
    name = f'<th scope="row">{render_text(first)}</th>' if first else "<td></td>"
    cells = [name, *(f"<td>{escape_html(cell)}</td>" for cell in rest)]
    if len(row) < width:  # a remark
        cells[-1] = f'<td class="remark" colspan="{width - len(row) + 1}">{escape_html(row[-1])}</td>'
    mark = ' class="chosen"' if is_chosen else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def render_figure(drawn: str, title: str) -> str:
    """A picture under its title."""
    return f'<figure class="chart"><figcaption>{escape_html(title)}</figcaption>{drawn}</figure>'


def render_pair(figures: Sequence[str]) -> str:
    """Pictures side by side where there is room."""
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def render_remark(words: str) -> str:
    return f'<p class="remark">{escape_html(words)}</p>'


def render_cautions(sentences: Sequence[str]) -> str:
    """What must be read before any figure; '' where there is nothing to beware of."""
    said = "".join(f"<p>{escape_html(one)}</p>" for one in sentences)
    return f'<section class="caution" id="caution" aria-label="Beware">{said}</section>' if said else ""


def render_section(name: str, title: str, intro: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<section id="{name}"><h2>{escape_html(title)}</h2>\n<p class="intro">{escape_html(intro)}</p>\n{body}</section>'


def render_folded_section(name: str, title: str, intro: str, parts: Sequence[str], hint: str = "") -> str:
    """A section that opens on demand; hint: a few words on what is inside."""
    shown = f"<span>{escape_html(hint)}</span>" if hint else ""
    head = f"<summary><h2>{escape_html(title)}</h2>{shown}</summary>"
    body = "\n".join(parts)
    return f'<details class="fold" id="{name}">{head}\n<p class="intro">{escape_html(intro)}</p>\n{body}</details>'


def render_script(code: str) -> tuple[str, str]:
    """An inline script and the source that allows it, and nothing else, in the page's content security policy."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"<script>{code}</script>", f"'sha256-{digest}'"


def render_page(title: str, about: str, body: Sequence[str]) -> str:
    """A page of these parts. Its policy lets nothing be fetched and no script run but its own."""
    script, script_hash = markup.render_script(_piece("page.js"))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {script_hash}"
    joined = "\n".join(part for part in body if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape_html(title)}: {escape_html(about)}</title>
<style>{_piece("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header><h1>{escape_html(title)}</h1><p>{markup.render_text(about)}</p></header>
<main id="main">
{joined}
</main>
<footer><p>Made by knowgate {VERSION}. This file is complete: it fetches nothing.</p></footer>
{script}
</body>
</html>
"""


def _piece(name: str) -> str:
    return (resources.files("knowgate.evaluation.report") / "assets" / name).read_text(encoding="utf-8")


MAX_TEXT_LENGTH = (
    2000  # characters of a text that are shown: twenty questions of ten long passages would make a page too big
)
MAX_PASSAGES = 10


def render_extreme_question(row: LabelRow) -> str:
    """A question that retrieval changed, with its answers."""
    rise, benefit = measure_retrieval_change(row)
    kind = "harmed" if (rise, benefit) < (0, 0) else "helped"
    mark = f'<span class="change {kind}">{rise:+.2f}</span>'
    return render_question(row, mark, f"benefit {benefit:+d}")


def render_question(row: LabelRow, mark: str, about: str) -> str:
    """A question behind a mark, which is HTML; about: a few words on it. Runs without texts show its id."""
    sides = {"Closed book": row.closed, "Open book": row.open, "MASK": row.mask}
    lines = [("Gold answers", _text(" / ".join(row.answers)) if row.answers else "<em>none on record</em>")]
    lines += [("Choices", _text(" / ".join(row.choices)))] if any(row.choices) else []
    lines += [(name, _side(side)) for name, side in sides.items() if side is not None]
    facts = "".join(f"<dt>{name}</dt><dd>{told}</dd>" for name, told in lines)
    head = f"<summary>{mark} {_text(row.question or row.id)}</summary>"
    small = f'<p class="id">{_text(row.id)} · {escape_html(about)}</p>'
    answers = f'<dl class="answers">{facts}</dl>'
    return f'<details class="question">{head}{small}{answers}{_passages(row.passages)}</details>'


def _side(side: GradedAnswer) -> str:
    verdict = {True: "right", False: "wrong", None: "not graded"}[side.correct]
    numbers = [f"mastery {format_number(side.mastery)}", f"certainty {format_number(side.certainty)}"]
    known = [told for told in numbers if not told.endswith("–")]
    answer = _text(side.text) if side.text else "<em>text not on record</em>"
    return f'{answer} <span class="verdict-mark {verdict.split()[0]}">{", ".join([verdict, *known])}</span>'


def _passages(passages: Sequence[Passage]) -> str:
    if not passages:
        return ""
    items = "".join(
        f"<li><strong>{_text(p.title or p.id)}</strong> {_text(p.text)}</li>" for p in passages[:MAX_PASSAGES]
    )
    more = f"<p>… and {len(passages) - MAX_PASSAGES} more</p>" if len(passages) > MAX_PASSAGES else ""
    return f"<details><summary>{len(passages)} passages</summary><ol>{items}</ol>{more}</details>"


def _text(words: str) -> str:
    """Of unknown direction: it does not turn what stands around it."""
    cut = words if len(words) <= MAX_TEXT_LENGTH else words[:MAX_TEXT_LENGTH] + " … (cut)"
    return f'<bdi dir="auto">{escape_html(cut)}</bdi>'
