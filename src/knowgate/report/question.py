"""A labelled question on a page: its answers open on a click, its passages on another."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.display import number
from knowgate.evaluation import change
from knowgate.markup import escape
from knowgate.runs import GradedAnswer, LabelRow
from knowgate.types import Passage

LONGEST = 2000  # characters of a text that are shown: twenty questions of ten long passages would make a page too big
PASSAGES = 10


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


def _side(side: GradedAnswer) -> str:
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
