"""What the report needs of a labelled question, small enough to keep for every question of a long run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from knowgate.labels import is_mask, says_mask
from knowgate.runs import GradedAnswer, LabelRow, slice_values
from knowgate.text import gold_letter, grade_choice, grade_contains, is_exact, normalise
from knowgate.types import Question

INDICATORS = ("mastery", "certainty")
CLOSE = 1e-9  # rows hold six digits; thresholds and borders are compared with this much slack


@dataclass(frozen=True, slots=True)
class Fact:
    """One question that did not fail. `indicators` and `effects` by name; absent ones are None, never 0."""

    has_gold: bool
    has_open: bool
    closed: bool | None
    open: bool | None
    mask: bool | None
    benefit: int | None
    indicators: Mapping[str, float | None]
    effects: Mapping[str, str | None]
    open_certainty: float | None = None
    is_mask: bool | None = None  # the MASK answer is the word MASK; None: there is no MASK answer
    says_mask: bool | None = None
    shown: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # open, mask -> the indicators there
    frequency: int | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)  # side -> grader -> verdict


def fact_of(row: LabelRow) -> Fact:
    question = Question(row.question, answers=row.answers, choices=row.choices, meta=row.meta)
    closed, opened, masked = row.closed, row.open, row.mask
    return Fact(
        has_gold=has_gold(question) or (closed is not None and closed.correct is not None),  # packed runs lack golds
        has_open=opened is not None,
        closed=closed.correct if closed else None,
        open=opened.correct if opened else None,
        mask=masked.correct if masked else None,
        benefit=row.benefit,
        indicators=_indicators(closed),
        effects={name: getattr(row, f"effect_{name}") for name in INDICATORS},
        open_certainty=opened.certainty if opened else None,
        is_mask=is_mask(masked.text) if masked else None,
        says_mask=says_mask(masked.text) if masked else None,
        shown={name: _indicators(side) for name, side in (("open", opened), ("mask", masked)) if side is not None},
        frequency=row.answer_frequency,
        slices=slice_values(row),
        verdicts=_verdicts(row, question),
    )


def _indicators(side: GradedAnswer | None) -> dict[str, float | None]:
    return {name: getattr(side, name) if side else None for name in INDICATORS}


def has_gold(question: Question) -> bool:
    return any(normalise(answer) for answer in question.answers) or bool(question.meta.get("gold_letter"))


def _verdicts(row: LabelRow, question: Question) -> dict[str, dict[str, bool]]:
    if not has_gold(question):
        return {}
    sides = {"closed": row.closed, "open": row.open}
    return {name: _graders(side, row.grader, question) for name, side in sides.items() if side is not None}


def _graders(side: GradedAnswer, recorded: str, question: Question) -> dict[str, bool]:
    """The string graders anew, and the recorded verdict where it came from another one: a judge."""
    verdicts = {
        "exact": is_exact(side.text, question.answers),
        "contains": grade_contains(side.text, question).correct,
    }
    if question.choices and gold_letter(question) is not None:
        verdicts["choice"] = grade_choice(side.text, question)
    if side.correct is not None and recorded not in {"exact", "contains", "choice"}:
        verdicts[recorded or "recorded"] = side.correct
    return verdicts
