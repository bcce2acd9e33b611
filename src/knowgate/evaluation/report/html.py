"""HTML of report pages. Every text that comes from a run is escaped."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from knowgate.core import VERSION
from knowgate.core.display import TextTable, format_number
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.evaluation.boundary import NO_CHANGE, measure_retrieval_change
from knowgate.types import Passage
from knowgate.types.markup import escape_html

NO_QUESTION_TEXTS = (
    "This run is packed: it holds no question texts, so ids are shown. To see the questions, make the report from the run that "
    "knowgate label or import-answers wrote, or restore the texts (docs/papers.md, 'With the runs of the repository')."
)
MAX_TEXT_LENGTH = 2000  # characters; twenty questions of ten long passages would make a page too large
MAX_PASSAGES = 10


def render_page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """Render a complete HTML file. Its content security policy allows only its own style and script."""
    script = _read_file("assets/page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_read_file("page.html")).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        title=escape_html(title),
        subtitle=render_text(subtitle),
        subtitle_text=escape_html(subtitle),
        style=_read_file("assets/page.css"),
        body="\n".join(section for section in sections if section),
        version=VERSION,
        script=script,
    )


def _read_file(name: str) -> str:
    """Read a file that is packaged with the reports, such as the template of a page."""
    return (resources.files("knowgate.evaluation.report") / name).read_text(encoding="utf-8")


@cache
def load_texts(table: str) -> dict[str, Any]:
    """Load one table of `texts.toml`, such as the definitions of columns."""
    texts: dict[str, Any] = tomllib.loads(_read_file("texts.toml"))[table]
    return texts


def render_text(text: str) -> str:
    """Render a text of unknown direction, isolated so that right-to-left letters do not affect its surroundings."""
    return f'<bdi dir="auto">{escape_html(text)}</bdi>'


# --- sections -------------------------------------------------------------------------------------


def render_verdict(level: str, label: str, headline: str, text: str) -> str:
    """Render the section with the verdict of a report: its label, its headline and the reasons."""
    content = f"<h2>{render_text(headline)}</h2><p>{escape_html(text)}</p>"
    return f'<section class="verdict {level}" id="verdict"><p class="light">{label}</p>{content}</section>'


def render_section(name: str, title: str, intro: str, parts: Sequence[str]) -> str:
    """Render a section of a report as HTML.

    Args:
        name: HTML id of the section, which links can point to.
        title: Heading.
        intro: Introduction, as plain text.
        parts: Content, as HTML.
    """
    body = "\n".join(parts)
    heading = f"<h2>{escape_html(title)}</h2>"
    return f'<section id="{name}">{heading}\n<p class="intro">{escape_html(intro)}</p>\n{body}</section>'


def render_folded_section(name: str, title: str, intro: str, parts: Sequence[str], hint: str = "") -> str:
    """Render a section that is collapsed until it is clicked. `hint` says what is inside."""
    hint_span = f"<span>{escape_html(hint)}</span>" if hint else ""
    summary = f"<summary><h2>{escape_html(title)}</h2>{hint_span}</summary>"
    body = "\n".join(parts)
    return f'<details class="fold" id="{name}">{summary}\n<p class="intro">{escape_html(intro)}</p>\n{body}</details>'


def render_cautions(sentences: Sequence[str]) -> str:
    """Render warnings that must be read before any number. Empty without warnings."""
    paragraphs = "".join(f"<p>{escape_html(sentence)}</p>" for sentence in sentences)
    if not paragraphs:
        return ""
    return f'<section class="caution" id="caution" aria-label="Beware">{paragraphs}</section>'


def render_figure(chart: str, title: str) -> str:
    """Render a chart with a caption."""
    return f'<figure class="chart"><figcaption>{escape_html(title)}</figcaption>{chart}</figure>'


def render_pair(figures: Sequence[str]) -> str:
    """Render figures side by side where there is room."""
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def render_remark(text: str) -> str:
    """Render a paragraph of small print."""
    return f'<p class="remark">{escape_html(text)}</p>'


# --- tables ---------------------------------------------------------------------------------------


def render_table(
    table: TextTable,
    definitions: Mapping[str, str] | None = None,
    css_class: str = "",
    highlighted: Collection[str] = (),
) -> str:
    """Render a table.

    Args:
        table: The table.
        definitions: What the columns mean. Their heads link to these definitions.
        css_class: Class of the table: 'text', or 'sortable wide' for one that is sorted by a click on a column head.
        highlighted: First cells of the rows to highlight.
    """
    is_sortable = "sortable" in css_class
    heads = [_render_head(column, definitions or {}, with_link=not is_sortable) for column in table.columns]
    body = "\n".join(_render_row(row, len(table.columns), is_highlighted=row[0] in highlighted) for row in table.rows)
    content = f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>{body}</tbody>"
    return _render_scrolling_table(content, table.title, css_class)


def render_definitions(definitions: Mapping[str, str]) -> str:
    """Render a table of terms and their definitions, each an anchor for links."""
    rows = "".join(
        f'<tr id="{make_anchor(name)}"><th scope="row">{escape_html(name)}</th><td>{escape_html(text)}</td></tr>'
        for name, text in definitions.items()
    )
    head = '<thead><tr><th scope="col">number</th><th scope="col">how it is computed</th></tr></thead>'
    return _render_scrolling_table(f"{head}<tbody>{rows}</tbody>", "Definitions", "text")


def make_anchor(name: str) -> str:
    """Return the id of a definition."""
    return "how-" + "".join(char if char.isalnum() else "-" for char in name)


def _render_scrolling_table(content: str, title: str, css_class: str) -> str:
    """Render a table that scrolls sideways and can be focused with the keyboard."""
    attribute = f' class="{css_class}"' if css_class else ""
    container = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_html(title)}">'
    return f"{container}<table{attribute}><caption>{escape_html(title)}</caption>{content}</table></div>"


def _render_head(column: str, definitions: Mapping[str, str], *, with_link: bool) -> str:
    """Render a column's head. Its definition shows on hover."""
    if not column:
        return "<td></td>"
    name = escape_html(column)
    if column not in definitions:
        return f'<th scope="col">{name}</th>'
    title = escape_html(definitions[column])
    if with_link:
        name = f'<a href="#{make_anchor(column)}">{name}</a>'
    return f'<th scope="col" title="{title}">{name}</th>'


def _render_row(row: Sequence[str], width: int, *, is_highlighted: bool = False) -> str:
    """Render a row. In a short row, the last cell spans the remaining columns."""
    first, *rest = row
    cells = [f'<th scope="row">{render_text(first)}</th>' if first else "<td></td>"]
    cells += [f"<td>{escape_html(cell)}</td>" for cell in rest]
    if len(row) < width:
        cells[-1] = f'<td class="remark" colspan="{width - len(row) + 1}">{escape_html(row[-1])}</td>'
    attribute = ' class="chosen"' if is_highlighted else ""
    return f"<tr{attribute}>{''.join(cells)}</tr>"


# --- questions ------------------------------------------------------------------------------------


def render_extreme_question(row: LabelRow) -> str:
    """Render a question with a mark for the effect of retrieval.

    The mark is the change of the share of right samples, such as +0.30. If that share did not change, the mark is +1 or -1:
    retrieval turned the greedy answer right or wrong.
    """
    change = measure_retrieval_change(row)
    color = "harmed" if change < NO_CHANGE else "helped"
    number = f"{change.mastery:+.2f}" if change.mastery else f"{change.benefit:+d}"
    return render_question(row, f'<span class="change {color}">{number}</span>', f"benefit {change.benefit:+d}")


def render_question(row: LabelRow, mark: str, note: str) -> str:
    """Render a question with collapsed answers and passages.

    Args:
        row: The question. Its id is shown if it has no text.
        mark: HTML before the question.
        note: Text beside its id.
    """
    answers = {"Closed book": row.closed, "Open book": row.open, "MASK": row.mask}
    gold = _render_short(" / ".join(row.answers)) if row.answers else "<em>none on record</em>"
    items = [("Gold answers", gold)]
    if any(row.choices):
        items.append(("Choices", _render_short(" / ".join(row.choices))))
    items += [(name, _render_answer(answer)) for name, answer in answers.items() if answer is not None]
    content = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in items)
    return (
        f'<details class="question"><summary>{mark} {_render_short(row.question or row.id)}</summary>'
        f'<p class="id">{_render_short(row.id)} · {escape_html(note)}</p>'
        f'<dl class="answers">{content}</dl>{_render_passages(row.passages)}</details>'
    )


def _render_answer(answer: GradedAnswer) -> str:
    """Render an answer with its grade, mastery and certainty. Mastery is the share of right samples."""
    verdict = {True: "right", False: "wrong", None: "not graded"}[answer.correct]
    indicators = {"mastery": answer.mastery, "certainty": answer.certainty}
    known = [f"{name} {format_number(value)}" for name, value in indicators.items() if value is not None]
    text = _render_short(answer.text) if answer.text else "<em>text not on record</em>"
    return f'{text} <span class="verdict-mark {verdict.split()[0]}">{", ".join([verdict, *known])}</span>'


def _render_passages(passages: Sequence[Passage]) -> str:
    """Render passages as a collapsed list; only the first ones if there are many."""
    if not passages:
        return ""
    items = "".join(
        f"<li><strong>{_render_short(passage.title or passage.id)}</strong> {_render_short(passage.text)}</li>"
        for passage in passages[:MAX_PASSAGES]
    )
    more = f"<p>… and {len(passages) - MAX_PASSAGES} more</p>" if len(passages) > MAX_PASSAGES else ""
    return f"<details><summary>{len(passages)} passages</summary><ol>{items}</ol>{more}</details>"


def _render_short(text: str) -> str:
    """Render a text, cut if it is very long."""
    if len(text) > MAX_TEXT_LENGTH:
        text = text[:MAX_TEXT_LENGTH] + " … (cut)"
    return render_text(text)
