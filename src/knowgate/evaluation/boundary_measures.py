"""Measures of the knowledge boundary: facts about each question, savings at every threshold, slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from knowgate.core.text import get_gold_letter, grade_choice, grade_contains, is_exact_match, normalize
from knowgate.data.runs import rows as label_rows
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.labels.mask import is_mask, mentions_mask
from knowgate.stats.metrics import FloatArray
from knowgate.stats.proportions import Proportion, estimate_proportion, mean_of_known
from knowgate.types import Question

INDICATORS = ("mastery", "certainty")
SIDES = ("closed", "open", "mask")  # ways of answering: without passages, with them, with masked passages
STRING_GRADERS = ("exact", "contains", "choice")  # they compare texts, without an LLM
TOLERANCE = 1e-9  # rows are stored with six digits, so thresholds are compared with this tolerance
TABLE_THRESHOLDS = (0.2, 0.4, 0.6, 0.8, 1.0)
NOT_GIVEN = "(not given)"


# --- facts about a question -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuestionFacts:
    """Facts about one labeled question.

    Sides: 'closed' (without passages), 'open' (with passages), 'mask' (with masked passages).

    Attributes:
        has_gold: Whether the question has gold answers.
        has_open_book_answer: Whether it was answered with passages.
        correct: Whether the greedy answer is correct, by side; None if there is none or it is not graded.
        benefit: Effect of retrieval on the greedy answer: 1, 0 or -1.
        indicators: By side and name, 'mastery' (share of correct samples) and 'certainty' (how far the samples agree);
            None if unknown.
        effects: Effect of retrieval on each indicator: 'beneficial', 'neutral' or 'harmful'.
        is_mask: Whether the answer with masked passages is the word MASK; None without such an answer.
        mentions_mask: Whether it contains the word MASK.
        frequency: How many passages of the corpus contain the answer.
        slices: The group of the question in each dimension, such as {'language': 'en'}.
        verdicts: Whether each grader accepts the greedy answer, by side and name of the grader.
    """

    has_gold: bool
    has_open_book_answer: bool
    correct: Mapping[str, bool | None]
    benefit: int | None
    indicators: Mapping[str, Mapping[str, float | None]]
    effects: Mapping[str, str | None]
    is_mask: bool | None = None
    mentions_mask: bool | None = None
    frequency: int | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


def extract_facts(row: LabelRow) -> QuestionFacts:
    """Extract the facts for the knowledge report from one labeled question.

    The row has up to three answers: without passages ('closed'), with passages ('open'), and with passages in which the
    gold answers are replaced by the word MASK ('mask').
    """
    question = Question(row.question, answers=row.answers, choices=row.choices, meta=row.meta)
    answers = {"closed": row.closed, "open": row.open, "mask": row.mask}
    correct = {side: answer.correct if answer else None for side, answer in answers.items()}
    return QuestionFacts(
        # A run that was stored without texts has grades but no gold answers. A graded question had a gold answer.
        has_gold=has_gold_answer(question) or correct["closed"] is not None,
        has_open_book_answer=row.open is not None,
        correct=correct,
        benefit=row.benefit,
        indicators={
            side: {indicator: getattr(answer, indicator, None) for indicator in INDICATORS}  # None without an answer
            for side, answer in answers.items()
        },
        effects={indicator: getattr(row, f"effect_{indicator}") for indicator in INDICATORS},
        is_mask=is_mask(row.mask.text) if row.mask else None,
        mentions_mask=mentions_mask(row.mask.text) if row.mask else None,
        frequency=row.answer_frequency,
        slices=label_rows.list_slices(row),
        verdicts=_collect_row_verdicts(row, question),
    )


def _collect_row_verdicts(row: LabelRow, question: Question) -> dict[str, dict[str, bool]]:
    """Return the verdicts on both answers of a row, by side and grader.

    The graders are those that compare texts, and the one whose verdict is stored with the row.
    """
    if not has_gold_answer(question):
        return {}
    answers = {"closed": row.closed, "open": row.open}
    return {side: _collect_verdicts(answer, row.grader, question) for side, answer in answers.items() if answer}


def has_gold_answer(question: Question) -> bool:
    """Return whether a question has a gold answer, or a gold letter for its choices."""
    return any(normalize(answer) for answer in question.answers) or bool(question.meta.get("gold_letter"))


def _collect_verdicts(answer: GradedAnswer, stored_grader: str, question: Question) -> dict[str, bool]:
    """Return whether each grader accepts an answer, by name of the grader.

    Args:
        answer: The answer with its stored verdict.
        stored_grader: Name of the grader that gave the stored verdict.
        question: The question with its gold answers.
    """
    verdicts = {
        "exact": is_exact_match(answer.text, question.answers),
        "contains": grade_contains(answer.text, question).correct,
    }
    if question.choices and get_gold_letter(question) is not None:
        verdicts["choice"] = grade_choice(answer.text, question)
    # The verdict of a grader that compares texts was computed above. Others, such as an LLM's, are only stored.
    if answer.correct is not None and stored_grader not in STRING_GRADERS:
        verdicts[stored_grader or "recorded"] = answer.correct
    return verdicts


# --- savings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavingPoint:
    """Savings and accuracy if confident questions skip retrieval.

    Confident: high mastery (share of correct samples) or certainty (their agreement).

    Attributes:
        threshold: Retrieval is skipped for questions with at least this mastery or certainty. None: it is never skipped.
        saved: Share of searches that are saved because their questions are skipped.
        accuracy: Accuracy with closed-book answers for skipped questions and open-book answers for the others.
        random: Accuracy if as many questions, chosen at random, skip retrieval.
    """

    threshold: float | None
    saved: float
    accuracy: float
    random: float


@dataclass(frozen=True)
class SavingCurve:
    """Savings and accuracy at every threshold of an indicator.

    Indicators: mastery (share of correct samples) and certainty (their agreement).

    Attributes:
        n: Number of questions that have a value of the indicator and graded answers with and without passages.
        always: Accuracy of always retrieving.
        never: Accuracy of never retrieving.
        points: One point for each distinct threshold, from skipping nothing to skipping everything.
        marks: Points at the round thresholds that tables show (0.2, 0.4, ...).
    """

    n: int
    always: float
    never: float
    points: tuple[SavingPoint, ...]
    marks: tuple[SavingPoint, ...]


def compute_saving_curve(facts: Sequence[QuestionFacts], indicator: str) -> SavingCurve | None:
    """Compute savings and costs of skipping retrieval for questions of high mastery or certainty.

    Args:
        facts: The questions.
        indicator: 'mastery' (share of samples that are right) or 'certainty' (how far they agree), without passages.

    Returns:
        The curve over all thresholds; None if no question has grades of both answers.
    """
    values = [(fact.indicators["closed"][indicator], fact.correct["closed"], fact.correct["open"]) for fact in facts]
    complete = [case for case in values if None not in case]
    if not complete:
        return None
    cases = _SavingCases(*np.array(complete, dtype=np.float64).T)
    always = float(cases.open_book_right.mean())
    never = float(cases.closed_book_right.mean())
    nothing_skipped = SavingPoint(None, saved=0.0, accuracy=always, random=always)
    points = [nothing_skipped, *map(cases.measure_threshold, _list_distinct(cases.values))]
    table_points = map(cases.measure_threshold, TABLE_THRESHOLDS)
    return SavingCurve(len(cases.values), always, never, points=tuple(points), marks=tuple(table_points))


class _SavingCases(NamedTuple):
    """Questions with mastery or certainty and two grades. Each field has one value per question.

    Attributes:
        values: Mastery (share of correct samples) or certainty (their agreement).
        closed_book_right: 1 if the answer without passages is right, else 0.
        open_book_right: 1 if the answer with passages is right, else 0.
    """

    values: FloatArray
    closed_book_right: FloatArray
    open_book_right: FloatArray

    def measure_threshold(self, threshold: float) -> SavingPoint:
        """Measure the savings and accuracy if all questions with a value of at least `threshold` skip retrieval."""
        is_skipped = self.values >= threshold - TOLERANCE
        saved = float(is_skipped.mean())
        accuracy = float(np.where(is_skipped, self.closed_book_right, self.open_book_right).mean())
        expected_right = saved * self.closed_book_right + (1 - saved) * self.open_book_right  # with random skips
        return SavingPoint(threshold, saved, accuracy, random=float(expected_right.mean()))


def _list_distinct(values: FloatArray) -> list[float]:
    """Return the distinct values from highest to lowest. Of values that differ by rounding, the lowest is kept."""
    ascending = np.sort(values)
    exceeds_last = np.diff(ascending, prepend=-np.inf) > TOLERANCE  # by more than a rounding error
    distinct: list[float] = ascending[exceeds_last].tolist()
    return distinct[::-1]


# --- copied masks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopyRate:
    """How often the LLM copies the word MASK from passages in which MASK replaces the gold answers.

    Each share is of the answers with such masked passages. A question is certain if all its sampled answers agree.

    Attributes:
        is_mask: Share of answers that are just MASK, among questions that are certain with the original passages.
        says_mask: Share of answers that contain MASK, among questions that are certain with the original passages.
        anywhere: Share of answers that are just MASK, among all questions.
        under_mask: Share of answers that are just MASK, among questions that are certain with the masked passages.
    """

    is_mask: Proportion
    says_mask: Proportion
    anywhere: Proportion
    under_mask: Proportion


def measure_copy_rate(facts: Sequence[QuestionFacts]) -> CopyRate | None:
    """Measure how often the LLM copies the word MASK from passages. None without answers to masked passages."""
    masked = [fact for fact in facts if fact.is_mask is not None]
    if not masked:
        return None
    certain_open_book = [fact for fact in masked if _samples_agree(fact, "open")]
    return CopyRate(
        is_mask=estimate_proportion(fact.is_mask for fact in certain_open_book),
        says_mask=estimate_proportion(fact.mentions_mask for fact in certain_open_book),
        anywhere=estimate_proportion(fact.is_mask for fact in masked),
        under_mask=estimate_proportion(fact.is_mask for fact in masked if _samples_agree(fact, "mask")),
    )


def _samples_agree(fact: QuestionFacts, side: str) -> bool:
    """Return whether all sampled answers of a side agree, which means certainty 1."""
    return (fact.indicators[side]["certainty"] or 0.0) >= 1 - TOLERANCE


# --- slices ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSlice:
    """Measures of a group of questions, such as all questions in one language.

    Attributes:
        dimension: What the questions are grouped by, such as 'language'.
        value: The group, such as 'en'.
        n: Number of questions; 0 for an empty group.
        closed: Closed-book accuracy on the questions with a graded open-book answer, or on all if there are none.
        open: Open-book accuracy.
        benefit: Mean effect of retrieval on the greedy answer: 1 if it helps, -1 if it hurts.
        mastery: Mean share of correct closed-book samples.
        certainty: Mean agreement of the closed-book samples.
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
    """Measure groups of questions, such as all questions of one language. Questions of no group come last."""
    slices: list[RunSlice] = []
    for dimension in label_rows.SLICE_DIMENSIONS:
        if dimension == label_rows.ANSWER_FREQUENCY:  # a number, so its groups are thirds
            groups = label_rows.assign_frequency_thirds([fact.frequency for fact in facts])
            names: Sequence[str] = label_rows.FREQUENCY_THIRDS
        else:
            groups = [fact.slices.get(dimension) for fact in facts]  # the group of each question
            names = sorted({group for group in groups if group})
        if any(groups):
            slices += [summarize_slice(dimension, name, _select(facts, groups, name)) for name in names]
            others = _select(facts, groups, None)
            if others:
                slices.append(summarize_slice(dimension, NOT_GIVEN, others))
    return tuple(slices)


def _select(facts: Sequence[QuestionFacts], groups: Sequence[str | None], name: str | None) -> list[QuestionFacts]:
    """Return the questions of one group. `groups` has the group of each question."""
    return [fact for fact, group in zip(facts, groups, strict=True) if group == name]


def summarize_slice(dimension: str, value: str, facts: Sequence[QuestionFacts]) -> RunSlice:
    """Measure one group of questions.

    If any question was answered with passages, the accuracy without passages is that on these questions.

    Args:
        dimension: What the questions are grouped by, such as 'language'.
        value: The group, such as 'en'.
        facts: The questions of the group.
    """
    answered_both_ways = [fact for fact in facts if fact.correct["open"] is not None]
    closed_book_indicators = [fact.indicators["closed"] for fact in facts]
    return RunSlice(
        dimension,
        value,
        n=len(facts),
        closed=estimate_proportion(fact.correct["closed"] for fact in answered_both_ways or facts),
        open=estimate_proportion(fact.correct["open"] for fact in facts),
        benefit=mean_of_known(fact.benefit for fact in facts),
        mastery=mean_of_known(indicators["mastery"] for indicators in closed_book_indicators),
        certainty=mean_of_known(indicators["certainty"] for indicators in closed_book_indicators),
    )
