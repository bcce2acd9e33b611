"""What the report needs of a labelled question, small enough to keep for every question of a long run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from knowgate.core.text import get_gold_letter, grade_choice, grade_contains, is_exact_match, normalize
from knowgate.data.runs.rows import (
    ANSWER_FREQUENCY,
    FREQUENCY_THIRDS,
    SLICE_DIMENSIONS,
    GradedAnswer,
    LabelRow,
    assign_frequency_thirds,
    list_slices,
)
from knowgate.labels.mask import is_mask, mentions_mask
from knowgate.stats.proportions import Proportion, estimate_proportion, mean_of_known
from knowgate.types import Question

INDICATORS = ("mastery", "certainty")
TOLERANCE = 1e-9  # rows hold six digits; thresholds and borders are compared with this much slack


@dataclass(frozen=True, slots=True)
class QuestionFacts:
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


def extract_facts(row: LabelRow) -> QuestionFacts:
    question = Question(row.question, answers=row.answers, choices=row.choices, meta=row.meta)
    closed, opened, masked = row.closed, row.open, row.mask
    return QuestionFacts(
        has_gold=has_gold_answer(question)
        or (closed is not None and closed.correct is not None),  # packed runs lack golds
        has_open=opened is not None,
        closed=closed.correct if closed else None,
        open=opened.correct if opened else None,
        mask=masked.correct if masked else None,
        benefit=row.benefit,
        indicators=_indicators(closed),
        effects={name: getattr(row, f"effect_{name}") for name in INDICATORS},
        open_certainty=opened.certainty if opened else None,
        is_mask=is_mask(masked.text) if masked else None,
        says_mask=mentions_mask(masked.text) if masked else None,
        shown={name: _indicators(side) for name, side in (("open", opened), ("mask", masked)) if side is not None},
        frequency=row.answer_frequency,
        slices=list_slices(row),
        verdicts=_verdicts(row, question),
    )


def _indicators(side: GradedAnswer | None) -> dict[str, float | None]:
    return {name: getattr(side, name) if side else None for name in INDICATORS}


def has_gold_answer(question: Question) -> bool:
    return any(normalize(answer) for answer in question.answers) or bool(question.meta.get("gold_letter"))


def _verdicts(row: LabelRow, question: Question) -> dict[str, dict[str, bool]]:
    if not has_gold_answer(question):
        return {}
    sides = {"closed": row.closed, "open": row.open}
    return {name: _graders(side, row.grader, question) for name, side in sides.items() if side is not None}


def _graders(side: GradedAnswer, recorded: str, question: Question) -> dict[str, bool]:
    """The string graders anew, and the recorded verdict where it came from another one: a judge."""
    verdicts = {
        "exact": is_exact_match(side.text, question.answers),
        "contains": grade_contains(side.text, question).correct,
    }
    if question.choices and get_gold_letter(question) is not None:
        verdicts["choice"] = grade_choice(side.text, question)
    if side.correct is not None and recorded not in {"exact", "contains", "choice"}:
        verdicts[recorded or "recorded"] = side.correct
    return verdicts


TABLE_THRESHOLDS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class SavingPoint:
    """Retrieval is skipped where the indicator is at least the threshold (None: never skipped).

    saved: share of questions skipped. accuracy: closed-book answers where skipped, open-book ones elsewhere.
    random: the accuracy of skipping as many questions at random.
    """

    threshold: float | None
    saved: float
    accuracy: float
    random: float


@dataclass(frozen=True)
class SavingCurve:
    """points: every distinct threshold, from skipping nothing to skipping all. marks: the thresholds of the table."""

    n: int
    always: float
    never: float
    points: tuple[SavingPoint, ...]
    marks: tuple[SavingPoint, ...]


def compute_saving_curve(facts: Sequence[QuestionFacts], indicator: str) -> SavingCurve | None:
    """Over the questions with the indicator and both answers graded; None when there is none."""
    cases = _cases(facts, indicator)
    if not cases:
        return None
    n = len(cases)
    always = sum(opened for _, _, opened in cases) / n
    never = sum(closed for _, closed, _ in cases) / n
    right = list(itertools.accumulate((c - o for _, c, o in cases), initial=sum(o for _, _, o in cases)))

    def point(threshold: float | None, skipped: int) -> SavingPoint:
        saved = skipped / n
        return SavingPoint(threshold, saved, right[skipped] / n, saved * never + (1 - saved) * always)

    borders = [
        number + 1 for number in range(n) if number + 1 == n or cases[number][0] - cases[number + 1][0] > TOLERANCE
    ]
    points = [point(None, 0), *(point(cases[border - 1][0], border) for border in borders)]
    marks = [point(mark, sum(value >= mark - TOLERANCE for value, _, _ in cases)) for mark in TABLE_THRESHOLDS]
    return SavingCurve(n, always, never, tuple(points), tuple(marks))


def _cases(facts: Sequence[QuestionFacts], indicator: str) -> list[tuple[float, bool, bool]]:
    """(indicator, closed right, open right), the highest indicator first."""
    cases = [
        (value, fact.closed, fact.open)
        for fact in facts
        if (value := fact.indicators[indicator]) is not None and fact.closed is not None and fact.open is not None
    ]
    return sorted(cases, key=lambda case: -case[0])


NOT_GIVEN = "(not given)"


@dataclass(frozen=True)
class RunSlice:
    """Part of a run; n is 0 for a part that exists by name only. Means are over the questions that have the value.

    closed: over the questions of `open`, so that both can be compared; over all where none was answered with passages.
    """

    dimension: str
    value: str
    n: int
    closed: Proportion
    open: Proportion
    benefit: float | None
    mastery: float | None
    certainty: float | None


def compute_run_slices(facts: Sequence[QuestionFacts]) -> tuple[RunSlice, ...]:
    """Every dimension this run's data say something about. Those with one value matter only beside other runs."""
    parts: list[RunSlice] = []
    for dimension in SLICE_DIMENSIONS:
        groups = _thirds(facts) if dimension == ANSWER_FREQUENCY else _groups(facts, dimension)
        if set(groups) - {NOT_GIVEN}:
            parts += [summarize_slice(dimension, value, part) for value, part in groups.items()]
    return tuple(parts)


def summarize_slice(dimension: str, value: str, facts: Sequence[QuestionFacts]) -> RunSlice:
    matched = [fact for fact in facts if fact.open is not None] or facts
    return RunSlice(
        dimension,
        value,
        n=len(facts),
        closed=estimate_proportion(fact.closed for fact in matched),
        open=estimate_proportion(fact.open for fact in facts),
        benefit=mean_of_known(fact.benefit for fact in facts),
        mastery=mean_of_known(fact.indicators["mastery"] for fact in facts),
        certainty=mean_of_known(fact.indicators["certainty"] for fact in facts),
    )


def _groups(facts: Sequence[QuestionFacts], dimension: str) -> Mapping[str, list[QuestionFacts]]:
    """By value, in alphabetical order; questions without one come last."""
    groups: dict[str, list[QuestionFacts]] = {}
    for fact in facts:
        groups.setdefault(fact.slices.get(dimension, NOT_GIVEN), []).append(fact)
    names = sorted(groups, key=lambda name: (name == NOT_GIVEN, name))
    return {name: groups[name] for name in names}


def _thirds(facts: Sequence[QuestionFacts]) -> Mapping[str, list[QuestionFacts]]:
    """All three by name, a third that nothing fell into as well."""
    thirds = assign_frequency_thirds([fact.frequency for fact in facts])
    if not any(thirds):
        return {}
    groups: dict[str, list[QuestionFacts]] = {name: [] for name in (*FREQUENCY_THIRDS, NOT_GIVEN)}
    for fact, third in zip(facts, thirds, strict=True):
        groups[third or NOT_GIVEN].append(fact)
    return {name: part for name, part in groups.items() if part or name != NOT_GIVEN}
