"""Recommendation after an evaluation: which gate to use at which threshold, and how certain that is.

A gate whose stored guarantee holds here is recommended at its own threshold, unless the measurements contradict it.
Otherwise gate and threshold are chosen on the evaluated questions, within half of the accepted loss because a choice
looks better on the data it was made on. The choice is measured by cross-validation: it is repeated without each fifth
of the questions and tested on that fifth, so no question measures a choice that it influenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.core.validation import check_number
from knowgate.data.splits import hash_to_unit
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.gates.calibration.threshold_choice import list_candidate_thresholds
from knowgate.stats.bootstrap import Estimate, estimate_mean, estimate_means
from knowgate.stats.metrics import BoolArray, FloatArray

RecommendationLevel = Literal["use", "try", "leave", "unknown"]
MAX_LOSS = 0.02
FOLDS = 5
MIN_QUESTIONS = 100  # with fewer, a loss of a few points cannot be told from chance
MIN_SKIPPED = 0.02  # share of searches; a gate that skips fewer is not worth maintaining
Z_BOUND = 1.645  # normal quantile of a one-sided 95 % bound
Z_CERTAIN = 2.576  # normal quantile of a one-sided 99.5 % bound
Z_LIKELY = 1.96  # normal quantile of a one-sided 97.5 % bound
NEVER = "never"
UNKNOWN_ESTIMATE = Estimate(None)


@dataclass(frozen=True)
class Recommendation:
    """What to do with the evaluated gates.

    Attributes:
        level: 'use', 'try', 'leave' (no gate is worth using) or 'unknown' (too little data).
        n: Number of evaluated questions.
        max_loss: Accepted loss of accuracy.
        gate: Recommended gate, or the best one found. 'never' means to do without retrieval.
        skipped: Share of searches that the gate skips at `threshold`.
        held_out_skipped: The same on questions that the choice was not made on, like all estimates below.
        difference: Accuracy minus that of always retrieving.
        gain: Accuracy minus that of skipping as many searches at random. Undefined without a gate.
        beats_chance: Whether the gain is certain.
        agreeing_folds: In how many folds the same gate was chosen; 0 if no choice was made.
        guarantee: The guarantee that applies, in words.
        n_calibrated: How many of these questions the guarantee was calibrated on.
        skips: Whether each question is skipped.
        right: Whether the final answer to each question is correct.
    """

    level: RecommendationLevel
    n: int
    max_loss: float
    gate: str | None = None
    threshold: float | None = None
    skipped: Estimate = UNKNOWN_ESTIMATE
    held_out_skipped: Estimate = UNKNOWN_ESTIMATE
    difference: Estimate = UNKNOWN_ESTIMATE
    gain: Estimate = UNKNOWN_ESTIMATE
    beats_chance: bool = True
    agreeing_folds: int = 0
    guarantee: str = ""
    n_calibrated: int = 0
    skips: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    right: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)

    @property
    def is_without_retrieval(self) -> bool:
        """Whether the recommendation is to never retrieve, without any gate."""
        return self.gate == NEVER

    @property
    def is_positive(self) -> bool:
        """Whether something is recommended, for use or for a try."""
        return self.level in ("use", "try")


# Keys of summary.json, where they differ from the attributes.
SUMMARY_KEYS = {
    "level": "light",
    "held_out_skipped": "tried",
    "agreeing_folds": "agreed",
    "n_calibrated": "chosen_on",
}


def recommendation_to_dict(recommendation: Recommendation) -> dict[str, Any]:
    """Convert a recommendation to plain data, without the per-question arrays."""
    values = asdict(recommendation)
    return {SUMMARY_KEYS.get(name, name): value for name, value in values.items() if name not in ("skips", "right")}


def recommend(evaluation: Evaluation, max_loss: float = MAX_LOSS) -> Recommendation:
    """Recommend a gate and a threshold.

    Args:
        evaluation: Evaluated gates.
        max_loss: Share of the answers that skipping searches may cost.

    Returns:
        The recommendation. Its level is 'unknown' without open-book answers or with too few questions.
    """
    check_number(max_loss, "the largest loss")
    table = evaluation.table
    n = len(table.rows)
    if table.open_right is None:
        return Recommendation("unknown", n, max_loss)
    answers = CorrectAnswers(table.closed_right, table.open_right)
    guaranteed = _find_guaranteed_gate(evaluation)
    if guaranteed:
        recommendation = _recommend_guaranteed(evaluation, guaranteed, answers)
        if recommendation.is_positive:
            return recommendation
    choice = choose_gate(_list_options(evaluation), answers, np.ones(n, dtype=bool), max_loss / 2)
    if choice is None:
        return Recommendation("leave" if _has_enough_questions(evaluation) else "unknown", n, max_loss)
    return _recommend_choice(evaluation, choice, answers, max_loss)


# --- choice of gate and threshold -----------------------------------------------------------------


@dataclass(frozen=True)
class CorrectAnswers:
    """Which questions are answered correctly without passages (`closed`) and with them (`opened`)."""

    closed: BoolArray
    opened: BoolArray

    def apply(self, choice: GateChoice, rows: BoolArray) -> BoolArray:
        """Return whether the gate's final answers to some of the questions are correct."""
        if choice.option.fixed_threshold is not None:
            return choice.option.right[rows]
        return np.where(choice.skips(rows), self.closed[rows], self.opened[rows])


@dataclass(frozen=True)
class GateOption:
    """A gate that may be chosen.

    Attributes:
        right: Whether the gate's final answers at its own threshold are correct.
        fixed_threshold: The gate's own threshold, if its answers do not follow from the threshold alone.
    """

    gate: str
    needs: FloatArray = field(repr=False)
    right: BoolArray = field(repr=False)
    fixed_threshold: float | None = None


@dataclass(frozen=True)
class GateChoice:
    """A chosen gate and threshold, with the share of questions it skips where it was chosen."""

    option: GateOption
    threshold: float
    skipped: float

    def skips(self, rows: BoolArray) -> BoolArray:
        """Return whether each of some questions is skipped."""
        return self.option.needs[rows] <= self.threshold


@dataclass(frozen=True)
class SkipCounts:
    """Numbers of questions under each of several thresholds.

    Attributes:
        wins: Skipped questions that only the closed-book answer gets right.
        losses: Skipped questions that only the open-book answer gets right.
        skipped: All skipped questions.
    """

    wins: NDArray[Any]
    losses: NDArray[Any]
    skipped: NDArray[Any]

    def lower_bounds(self, n: int) -> FloatArray:
        """Bound the mean gain per question from below at 95 % confidence.

        One loss is added, so that thresholds with hardly any wins and losses are not taken for safe.
        """
        mean = (self.wins - self.losses - 1) / n
        variance = np.maximum((self.wins + self.losses + 1) / n - mean**2, 0)
        bounds: FloatArray = mean - Z_BOUND * np.sqrt(variance / n)
        return bounds


def choose_gate(
    options: Sequence[GateOption], answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateChoice | None:
    """Choose the gate and threshold that skip most questions within a loss, at 95 % confidence.

    Args:
        options: Gates to choose from. The first of equals wins.
        answers: Grades of both answers to each question.
        rows: The questions to choose on.
        max_loss: Accepted loss of accuracy.

    Returns:
        None if no gate can skip any question within the loss.
    """
    choices = [choice for option in options if (choice := _choose_threshold(option, answers, rows, max_loss))]
    return max(choices, key=lambda choice: choice.skipped, default=None)


def _choose_threshold(
    option: GateOption, answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateChoice | None:
    """Return the highest threshold whose loss stays within the limit, or None."""
    needs = option.needs[rows]
    if option.fixed_threshold is None:
        thresholds = list_candidate_thresholds(needs)
        counts = _count_skips(needs, answers.closed[rows], answers.opened[rows], thresholds)
    else:
        thresholds = np.array([option.fixed_threshold])
        counts = _count_fixed_skips(option, answers, rows, option.fixed_threshold)
    acceptable = np.flatnonzero((counts.lower_bounds(len(needs)) >= -max_loss) & (counts.skipped > 0))
    if not len(acceptable):
        return None
    last = acceptable[-1]
    return GateChoice(option, float(thresholds[last]), float(counts.skipped[last]) / len(needs))


def _count_skips(needs: FloatArray, closed: BoolArray, opened: BoolArray, thresholds: FloatArray) -> SkipCounts:
    order = np.argsort(needs, kind="stable")
    skipped = np.searchsorted(needs[order], thresholds, side="right")
    wins, losses = (
        np.concatenate([[0], np.cumsum(changed[order])]) for changed in (closed & ~opened, opened & ~closed)
    )
    return SkipCounts(wins[skipped], losses[skipped], skipped)


def _count_fixed_skips(option: GateOption, answers: CorrectAnswers, rows: BoolArray, threshold: float) -> SkipCounts:
    """Count wins, losses and skips of a gate that stays at its own threshold."""
    right, opened = option.right[rows], answers.opened[rows]
    columns = (right & ~opened, opened & ~right, option.needs[rows] <= threshold)
    return SkipCounts(*(np.array([column.sum()]) for column in columns))


def _list_options(evaluation: Evaluation) -> list[GateOption]:
    """List what can be chosen: doing without retrieval, and every gate that ranks questions."""
    table = evaluation.table
    options = [GateOption(NEVER, np.zeros(len(table.rows)), table.closed_right)]
    for gate in evaluation.ranking_gates:
        by_threshold = np.where(gate.retrieve, table.always_right, table.closed_right)
        is_movable = bool((by_threshold == gate.right).all())
        options.append(GateOption(gate.gate, gate.needs, gate.right, None if is_movable else gate.threshold))
    return options


# --- recommendation with a guarantee --------------------------------------------------------------


def _find_guaranteed_gate(evaluation: Evaluation) -> GateResult | None:
    """Return the gate that skips most among those whose guarantee holds. Grades do not influence this choice."""
    guaranteed = [
        gate
        for gate in evaluation.gates
        if (guarantee := evaluation.guarantees.get(gate.gate)) is not None and guarantee.holds
    ]
    return min(guaranteed, key=lambda gate: float(gate.retrieve.mean()), default=None)


def _recommend_guaranteed(evaluation: Evaluation, gate: GateResult, answers: CorrectAnswers) -> Recommendation:
    """Recommend a gate at its guaranteed threshold, with the loss that it was calibrated for."""
    guarantee = evaluation.guarantees[gate.gate]
    skips = ~gate.retrieve
    effect = _measure_effect(evaluation, answers, skips, gate.right.astype(float) - answers.opened)
    level = _choose_level(effect, guarantee.max_loss, is_guaranteed=True)
    recommendation = _make_recommendation(level, guarantee.max_loss, gate.gate, gate.threshold, effect)
    return replace(
        recommendation, guarantee=guarantee.text, n_calibrated=guarantee.n_calibrated, skips=skips, right=gate.right
    )


# --- recommendation chosen on these questions -----------------------------------------------------


def _recommend_choice(
    evaluation: Evaluation, choice: GateChoice, answers: CorrectAnswers, max_loss: float
) -> Recommendation:
    """Recommend a choice made on all questions, measured by cross-validation."""
    folds = _cross_validate(evaluation, answers, max_loss / 2)
    n = len(answers.closed)
    skips, changes, all_rows = np.zeros(n, dtype=bool), np.zeros(n), np.ones(n, dtype=bool)
    for fold, fold_choice in folds:
        if fold_choice is not None:
            skips[fold] = fold_choice.skips(fold)
            changes[fold] = answers.apply(fold_choice, fold).astype(float) - answers.opened[fold]
    effect = _measure_effect(evaluation, answers, skips, changes)
    if choice.option.gate == NEVER:
        effect = effect.without_gain()
    elif not effect.likely_beats_chance:
        without_retrieval = _recommend_no_retrieval(evaluation, answers, max_loss)
        if without_retrieval.is_positive:
            return without_retrieval
    skipped_by_choice = choice.skips(all_rows)
    level = _choose_level(effect, max_loss) if _has_enough_questions(evaluation) else "unknown"
    return replace(
        _make_recommendation(level, max_loss, choice.option.gate, choice.threshold, effect),
        skipped=estimate_mean(skipped_by_choice.astype(float), evaluation.resamples),
        agreeing_folds=Counter(fold.option.gate for _, fold in folds if fold)[choice.option.gate],
        skips=skipped_by_choice,
        right=answers.apply(choice, all_rows),
    )


def _recommend_no_retrieval(evaluation: Evaluation, answers: CorrectAnswers, max_loss: float) -> Recommendation:
    """Measure doing without retrieval. Nothing is chosen, so all questions measure it."""
    n = len(answers.closed)
    skips, changes = np.ones(n, dtype=bool), answers.closed.astype(float) - answers.opened
    effect = _measure_effect(evaluation, answers, skips, changes).without_gain()
    level = _choose_level(effect, max_loss) if _has_enough_questions(evaluation) else "unknown"
    return replace(_make_recommendation(level, max_loss, NEVER, 1.0, effect), skips=skips, right=answers.closed)


def _has_enough_questions(evaluation: Evaluation) -> bool:
    """Return whether there are enough distinct questions; repeated questions count once."""
    return len(np.unique(evaluation.table.question_fingerprints)) >= MIN_QUESTIONS


def _cross_validate(
    evaluation: Evaluation, answers: CorrectAnswers, max_loss: float
) -> list[tuple[BoolArray, GateChoice | None]]:
    """Pair each fold of the questions with the choice made on all others. Equal questions share a fold."""
    hashes = (hash_to_unit("recommend", str(key)) for key in evaluation.table.question_fingerprints)
    fold_of_row = np.array([int(value * FOLDS) for value in hashes])
    options = _list_options(evaluation)
    folds = [fold_of_row == number for number in range(FOLDS)]
    return [(fold, choose_gate(options, answers, ~fold, max_loss)) for fold in folds if fold.any() and not fold.all()]


# --- measurement ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SkipEffect:
    """Measured effect of skipping.

    Attributes:
        n: Number of questions.
        skipped: Share of questions skipped.
        difference: Accuracy minus that of always retrieving.
        gain: Accuracy minus that of skipping as many questions at random.
        beats_chance: Whether the gain is certain.
        likely_beats_chance: Whether the gain is at least likely.
    """

    n: int
    skipped: Estimate
    difference: Estimate
    gain: Estimate
    beats_chance: bool
    likely_beats_chance: bool

    def without_gain(self) -> _SkipEffect:
        """Return the effect for a choice that involves no gate, where a gain over chance is not defined."""
        return replace(self, gain=UNKNOWN_ESTIMATE, beats_chance=True, likely_beats_chance=True)


def _measure_effect(
    evaluation: Evaluation, answers: CorrectAnswers, skips: BoolArray, changes: FloatArray
) -> _SkipEffect:
    """Measure skipping. `changes` holds, per question, correctness minus that of always retrieving."""
    mean_change = float(answers.closed.mean() - answers.opened.mean())  # expected change of a random skip
    gains = changes - skips * mean_change
    skipped, difference, gain = estimate_means([skips.astype(float), changes, gains], evaluation.resamples)
    return _SkipEffect(
        len(skips), skipped, difference, gain, _is_above_zero(gains, Z_CERTAIN), _is_above_zero(gains, Z_LIKELY)
    )


def _is_above_zero(gains: FloatArray, z: float) -> bool:
    """Return whether the mean gain, with one loss added, is more than z standard errors above 0.

    Gains are rare and result from a choice, so a bootstrap interval is too optimistic: with shuffled needs, 32 of 400
    evaluations had an interval above 0, and 3 pass this test. The cutoff `Z_CERTAIN` is the strictest of three (1.96,
    2.33, 2.58), picked on shuffles of four recorded runs; those counts are from four other runs.
    """
    n = len(gains)
    standard_error = float(np.sqrt((np.sum((gains - gains.mean()) ** 2) + 1) / n / n))
    return float(gains.mean()) - 1 / n > z * standard_error


def _make_recommendation(
    level: RecommendationLevel, max_loss: float, gate: str, threshold: float, effect: _SkipEffect
) -> Recommendation:
    return Recommendation(
        level,
        effect.n,
        max_loss,
        gate,
        threshold,
        skipped=effect.skipped,
        held_out_skipped=effect.skipped,
        difference=effect.difference,
        gain=effect.gain,
        beats_chance=effect.beats_chance,
    )


def _choose_level(effect: _SkipEffect, max_loss: float, *, is_guaranteed: bool = False) -> RecommendationLevel:
    has_gain = effect.gain.value is None or effect.gain.value > 0
    loss = -(effect.difference.value or 0.0)
    if (effect.skipped.value or 0.0) < MIN_SKIPPED or loss > max_loss:
        return "leave"
    if is_guaranteed and has_gain:
        return "use"
    # One of many gates looks slightly better than chance by chance.
    if not is_guaranteed and not (has_gain and effect.likely_beats_chance):
        return "leave"
    loses_certainly = effect.difference.high is not None and effect.difference.high < 0
    if not effect.beats_chance and loses_certainly:
        return "leave"
    lowest = -1.0 if effect.difference.low is None else effect.difference.low
    return "use" if effect.beats_chance and lowest >= -max_loss else "try"
