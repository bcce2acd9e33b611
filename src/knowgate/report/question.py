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
    """A question that retrieval changed, with its answers."""
    rise, benefit = change(row)
    kind = "harmed" if (rise, benefit) < (0, 0) else "helped"
    mark = f'<span class="change {kind}">{rise:+.2f}</span>'
    return question(row, mark, f"benefit {benefit:+d}")


def question(row: LabelRow, mark: str, about: str) -> str:
    """A question behind a mark, which is HTML; about: a few words on it. Runs without texts show its id."""
    sides = {"Closed book": row.closed, "Open book": row.open, "MASK": row.mask}
    lines = [("Gold answers", _text(" / ".join(row.answers)) if row.answers else "<em>none on record</em>")]
    lines += [("Choices", _text(" / ".join(row.choices)))] if any(row.choices) else []
    lines += [(name, _side(side)) for name, side in sides.items() if side is not None]
    facts = "".join(f"<dt>{name}</dt><dd>{told}</dd>" for name, told in lines)
    head = f"<summary>{mark} {_text(row.question or row.id)}</summary>"
    small = f'<p class="id">{_text(row.id)} · {escape(about)}</p>'
    answers = f'<dl class="answers">{facts}</dl>'
    return f'<details class="question">{head}{small}{answers}{_passages(row.passages)}</details>'


def _side(side: GradedAnswer) -> str:
    verdict = {True: "right", False: "wrong", None: "not graded"}[side.correct]
    numbers = [f"mastery {number(side.mastery)}", f"certainty {number(side.certainty)}"]
    known = [told for told in numbers if not told.endswith("–")]
    answer = _text(side.text) if side.text else "<em>text not on record</em>"
    return f'{answer} <span class="verdict-mark {verdict.split()[0]}">{", ".join([verdict, *known])}</span>'


def _passages(passages: Sequence[Passage]) -> str:
    if not passages:
        return ""
    items = "".join(f"<li><strong>{_text(p.title or p.id)}</strong> {_text(p.text)}</li>" for p in passages[:PASSAGES])
    more = f"<p>… and {len(passages) - PASSAGES} more</p>" if len(passages) > PASSAGES else ""
    return f"<details><summary>{len(passages)} passages</summary><ol>{items}</ol>{more}</details>"


def _text(words: str) -> str:
    """Of unknown direction: it does not turn what stands around it."""
    cut = words if len(words) <= LONGEST else words[:LONGEST] + " … (cut)"
    return f'<bdi dir="auto">{escape(cut)}</bdi>'
