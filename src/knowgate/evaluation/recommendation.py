"""Recommendation after an evaluation: which gate to use at which threshold, and how certain that is.

A gate whose stored guarantee holds here is recommended at its own threshold, unless the measurements contradict it. The
verdict about one calibrated gate, such as a policy, is always about its own threshold: that is the one that runs.
Otherwise the gate and the threshold are chosen on the evaluated questions. A choice looks better on the data it was
made on, so it must stay within half of the accepted loss. The choice is measured by cross-validation: it is repeated
without each fifth of the questions and tested on that fifth. No question measures a choice that it influenced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from knowgate.core.validation import check_number
from knowgate.data.splits import hash_to_unit
from knowgate.evaluation.gate_choice import GateSetting, choose_gate
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.gates.calibration.threshold_choice import GateOutcomes
from knowgate.stats.bootstrap import Estimate, estimate_mean, estimate_means
from knowgate.stats.metrics import BoolArray, FloatArray

RecommendationLevel = Literal["use", "try", "leave", "unknown"]
MAX_LOSS = 0.02  # default share of the answers that skipping searches may cost
FOLDS = 5  # of cross-validation
MIN_AGREEING_FOLDS = 4  # with fewer that choose the same gate, the choice is not certain
MIN_SLICE_ROWS = 200  # questions of a slice that can prevent a certain recommendation
MIN_QUESTIONS = 100  # with fewer, a loss of a few points cannot be told from chance
MIN_SKIPPED = 0.02  # share of searches; a gate that skips fewer is not worth maintaining
# Normal quantile of a one-sided 99.5 % bound. With shuffled needs, where no gate is better than chance, it is the only
# one of three cutoffs (1.96, 2.33, 2.58) that few gates pass. It was picked on shuffles of four recorded runs.
Z_CERTAIN = 2.576
Z_LIKELY = 1.96  # normal quantile of a one-sided 97.5 % bound
NEVER = "never"  # name of the policy that never retrieves
UNKNOWN_ESTIMATE = Estimate(None)


@dataclass(frozen=True)
class SliceChange:
    """Accuracy change on one group of questions, against always retrieving.

    Attributes:
        name: The group, such as 'language en'.
        n: Number of its questions.
        change: Accuracy minus the accuracy of always retrieving.
    """

    name: str
    n: int
    change: Estimate


@dataclass(frozen=True)
class Recommendation:
    """What to do with the evaluated gates.

    Attributes:
        level: 'use', 'try', 'leave' (no gate is worth using) or 'unknown' (too little data).
        n: Number of evaluated questions.
        max_loss: Share of the answers that skipping searches may cost.
        gate: Recommended gate, or the best one found if none is recommended. 'never' means never to retrieve.
        threshold: The gate retrieves if need is above it.
        skipped: Share of searches that the gate skips at `threshold`.
        held_out_skipped: `skipped`, but measured by cross-validation, as are `difference`, `gain` and costs.
        difference: Accuracy of the gate minus that of always retrieving.
        gain: Accuracy of the gate minus that of skipping as many searches at random. Undefined without a gate.
        beats_chance: Whether the gain is certainly above 0, by more than `Z_CERTAIN` standard errors.
        likely_beats_chance: Whether the gain is probably above 0, by more than `Z_LIKELY` standard errors.
        agreeing_folds: Number of cross-validation folds that chose the same gate; 0 if no choice was made.
        guarantee: The stored guarantee that applies, in words; empty if none does.
        n_calibrated: Number of these questions that the guarantee was calibrated on.
        arbiter: Chooses between both answers after a search, which `difference` and `right` include; empty for none.
        losing_slices: Large groups of questions, such as a language, that certainly lose answers, worst first.
        at_own_threshold: Whether `threshold` is the calibrated one of the gate, rather than chosen on these questions.
        skips: Whether the search for each question is skipped at `threshold`.
        held_out_skips: `skips`, but decided by a gate and threshold that were chosen without the question.
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
    likely_beats_chance: bool = True
    agreeing_folds: int = 0
    guarantee: str = ""
    n_calibrated: int = 0
    arbiter: str = ""
    losing_slices: tuple[SliceChange, ...] = ()
    at_own_threshold: bool = False
    skips: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    held_out_skips: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    right: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)

    @property
    def is_without_retrieval(self) -> bool:
        """Whether the recommendation is to never retrieve, without any gate."""
        return self.gate == NEVER

    @property
    def saves_searches(self) -> bool:
        """Whether the gate skips a worthwhile share of the searches. If not, only an arbiter can be useful."""
        return (self.skipped.value or 0.0) >= MIN_SKIPPED

    @property
    def is_positive(self) -> bool:
        """Whether the recommendation is to use or try something."""
        return self.level in ("use", "try")

    @property
    def forbidden_slices(self) -> list[SliceChange]:
        """Large groups of questions with a certain loss above `max_loss`."""
        return [part for part in self.losing_slices if (part.change.high or 0.0) < -self.max_loss]

    @property
    def is_in_doubt(self) -> bool:
        """Whether the recommendation is doubtful: the choice is unstable or a group loses too much."""
        is_unstable = 0 < self.agreeing_folds < MIN_AGREEING_FOLDS  # 0 if nothing had to be chosen
        return is_unstable or bool(self.forbidden_slices)


# Keys of summary.json that differ from the names of the attributes.
SUMMARY_KEYS = {"level": "light", "held_out_skipped": "tried", "agreeing_folds": "agreed", "n_calibrated": "chosen_on"}
OMITTED_FIELDS = ("skips", "held_out_skips", "right", "likely_beats_chance")


def recommendation_to_dict(recommendation: Recommendation) -> dict[str, Any]:
    """Convert a recommendation to plain data, without the per-question arrays."""
    values = asdict(recommendation)
    return {SUMMARY_KEYS.get(name, name): value for name, value in values.items() if name not in OMITTED_FIELDS}


def recommend(evaluation: Evaluation, max_loss: float = MAX_LOSS) -> Recommendation:
    """Recommend a gate and a threshold. A gate with a valid guarantee, a proof of few lost answers, comes first.

    Args:
        evaluation: Evaluated gates.
        max_loss: Maximum share of the answers that skipping searches may make wrong.

    Returns:
        The recommendation. Its level is 'unknown' without open-book answers, without gates or with too few questions.
    """
    check_number(max_loss, "the maximum loss")
    table = evaluation.table
    if table.open_book_right is None:
        return Recommendation("unknown", len(table.rows), max_loss)
    arbitrated = evaluation.cascade.arbiter_right if evaluation.cascade else None
    never = GateOutcomes(np.zeros(len(table.rows)), table.closed_book_right, table.open_book_right, arbitrated)
    calibrated = _find_calibrated_gate(evaluation)
    if calibrated:
        recommendation = _recommend_own_threshold(evaluation, calibrated, never, max_loss)
        if recommendation.is_positive or evaluation.ranking_gates == [calibrated]:  # there is no other gate
            return recommendation
    recommendation = _recommend_best_gate(evaluation, never, max_loss)
    if recommendation.is_positive or evaluation.ranking_gates:
        return recommendation
    return replace(recommendation, level="unknown")  # no gate was evaluated that one could advise against


def _recommend_best_gate(evaluation: Evaluation, never: GateOutcomes, max_loss: float) -> Recommendation:
    """Choose a gate and threshold on all questions, and recommend them if they are useful.

    `never` are the outcomes of never retrieving, which counts as a gate that gives every question the need 0.
    """
    # Gates differ only in their needs. The grades of both answers to a question are the same for all gates.
    outcomes = {NEVER: never}
    outcomes |= {gate.gate: replace(never, needs=gate.needs) for gate in evaluation.ranking_gates}
    # A choice looks better on the questions that it was made on than on others, so only half of the loss is allowed there.
    choice = choose_gate(outcomes, np.ones(len(never), dtype=bool), max_loss / 2)
    if choice is None:
        level: RecommendationLevel = "leave" if _has_enough_questions(evaluation) else "unknown"
        return Recommendation(level, len(never), max_loss)
    folds = _cross_validate(evaluation, outcomes, max_loss / 2)
    return _recommend_choice(evaluation, choice, folds, max_loss)


# --- recommendation of a calibrated gate ----------------------------------------------------------


def _find_calibrated_gate(evaluation: Evaluation) -> GateResult | None:
    """Return the gate with a valid guarantee that skips most searches, or None.

    If only one gate is evaluated, a calibrated threshold is enough.
    """
    # This choice does not depend on grades, so the accuracy of the chosen gate can be measured on the same questions.
    names = {name for name, guarantee in evaluation.guarantees.items() if guarantee.holds}
    if not names and len(evaluation.ranking_gates) == 1:
        names = set(evaluation.guarantees)  # only gates with a calibrated threshold have an entry
    calibrated = [gate for gate in evaluation.gates if gate.gate in names]
    return min(calibrated, key=lambda gate: float(gate.retrieve.mean()), default=None)


def _recommend_own_threshold(
    evaluation: Evaluation, gate: GateResult, outcomes: GateOutcomes, max_loss: float
) -> Recommendation:
    """Recommend a gate at its own threshold. The arbiter takes part only if the guarantee includes it."""
    guarantee = evaluation.guarantees[gate.gate]
    arbiter = evaluation.cascade.arbiter if evaluation.cascade and guarantee.has_arbiter else ""
    if not arbiter:
        outcomes = replace(outcomes, arbitrated_right=None)
    skips = ~gate.retrieve
    unmeasured = Recommendation(
        level="unknown",  # `_set_level` sets it when the effect is measured
        n=len(skips),
        max_loss=guarantee.max_loss if guarantee.holds else max_loss,
        gate=gate.gate,
        threshold=gate.threshold,
        guarantee=guarantee.text if guarantee.holds else "",
        n_calibrated=guarantee.n_calibrated,
        arbiter=arbiter,
        at_own_threshold=True,
        skips=skips,
        right=np.where(skips, outcomes.closed_book_right, outcomes.retrieved_right),
    )
    measured = _measure_effect(evaluation, unmeasured, outcomes, _Folds([], skips, unmeasured.right))
    return _set_level(evaluation, measured, is_guaranteed=guarantee.holds)


# --- recommendation chosen on these questions -----------------------------------------------------


class _Folds(NamedTuple):
    """Result of cross-validation: the gate and threshold for each fold of the questions are chosen on the other folds.

    Attributes:
        gates: The chosen gates, one per fold. A fold for which no gate could be chosen has no entry.
        skips: Whether the search for each question is skipped. Without a chosen gate, no search is skipped.
        right: Whether the final answer to each question is right.
    """

    gates: list[str]
    skips: BoolArray
    right: BoolArray


def _cross_validate(evaluation: Evaluation, outcomes: Mapping[str, GateOutcomes], max_loss: float) -> _Folds:
    """Split the questions into fifths, and choose a gate for each fifth on the others. Repeated questions share a fold."""
    hashes = (hash_to_unit("recommend", str(key)) for key in evaluation.table.question_fingerprints)
    fold_of_row = np.array([int(value * FOLDS) for value in hashes])  # hashes are at least 0 and below 1
    # At first, every question is retrieved for. Folds with a chosen gate are overwritten below.
    always_right = outcomes[NEVER].open_book_right.copy()
    folds = _Folds(gates=[], skips=np.zeros(len(fold_of_row), dtype=bool), right=always_right)
    for rows in (fold_of_row == number for number in range(FOLDS)):
        if rows.any() and not rows.all():  # with few questions, a fold may be empty
            choice = choose_gate(outcomes, ~rows, max_loss)
            if choice is not None:
                folds.gates.append(choice.gate)
                folds.skips[rows] = choice.skips[rows]
                folds.right[rows] = choice.right[rows]
    return folds


def _recommend_choice(evaluation: Evaluation, choice: GateSetting, folds: _Folds, max_loss: float) -> Recommendation:
    """Recommend a gate chosen on all questions, or never retrieving if the gate is no better than chance.

    Cross-validation measures the effect of the gate.
    """
    unmeasured = Recommendation(
        level="unknown",  # `_set_level` sets it when the effect is measured
        n=len(choice.outcomes),
        max_loss=max_loss,
        gate=choice.gate,
        threshold=choice.threshold,
        agreeing_folds=folds.gates.count(choice.gate),
        arbiter=evaluation.cascade.arbiter if evaluation.cascade and choice.gate != NEVER else "",
        skips=choice.skips,
        right=choice.right,
    )
    measured = _measure_effect(evaluation, unmeasured, choice.outcomes, folds)
    if not measured.likely_beats_chance:
        without_retrieval = _recommend_no_retrieval(evaluation, choice.outcomes, max_loss)
        if without_retrieval.is_positive:
            return without_retrieval
    return _set_level(evaluation, measured)


def _find_losing_slices(evaluation: Evaluation, changes: FloatArray) -> tuple[SliceChange, ...]:
    """Return the large groups of questions that certainly lose accuracy, worst first.

    `changes` has 1 for each answer that became right, -1 for each that became wrong, else 0.
    """
    slices = measure_slice_changes(evaluation, changes, MIN_SLICE_ROWS)
    losing = [part for part in slices if part.change.high is not None and part.change.high < 0]
    return tuple(sorted(losing, key=lambda part: part.change.value or 0.0))


def measure_slice_changes(evaluation: Evaluation, changes: FloatArray, min_questions: int) -> list[SliceChange]:
    """Estimate the accuracy change of each group with at least `min_questions` questions.

    `changes` has 1 for each answer that became right, -1 for each that became wrong, else 0.
    """
    slices = []
    for part in evaluation.slices:
        if part.n >= min_questions:
            in_slice = evaluation.table.get_slice_values(part.dimension) == part.value
            change = estimate_mean(changes[in_slice], evaluation.resamples)
            slices.append(SliceChange(f"{part.dimension} {part.value}", part.n, change))
    return slices


def _recommend_no_retrieval(evaluation: Evaluation, outcomes: GateOutcomes, max_loss: float) -> Recommendation:
    """Build the recommendation to never retrieve, with its measured loss."""
    skips = np.ones(len(outcomes), dtype=bool)  # every search is skipped
    right = outcomes.closed_book_right
    # No need is above a threshold of 1. `_set_level` sets the level when the effect is measured.
    unmeasured = Recommendation("unknown", len(skips), max_loss, gate=NEVER, threshold=1.0, skips=skips, right=right)
    return _set_level(evaluation, _measure_effect(evaluation, unmeasured, outcomes, _Folds([], skips, right)))


def _has_enough_questions(evaluation: Evaluation) -> bool:
    """Return whether there are enough distinct questions; repeated questions count once."""
    return len(np.unique(evaluation.table.question_fingerprints)) >= MIN_QUESTIONS


# --- measurement ----------------------------------------------------------------------------------


def _measure_effect(
    evaluation: Evaluation, recommendation: Recommendation, outcomes: GateOutcomes, held_out: _Folds
) -> Recommendation:
    """Add the measured effect to a recommendation: skipped searches, and accuracy against always retrieving.

    Args:
        evaluation: The evaluation, for its number of resamples and its slices.
        recommendation: The gate and threshold, or never retrieving.
        outcomes: Grades of both answers to each question.
        held_out: Skips and final answers, with a gate and threshold that were chosen without the question itself.
    """
    # 1 if the answer is right only with the gate, -1 if it is right only with always retrieving, else 0.
    changes = held_out.right.astype(float) - outcomes.open_book_right
    gains = _compute_gains(changes, outcomes, held_out.skips)
    columns = [recommendation.skips.astype(float), held_out.skips.astype(float), changes, gains]
    skipped, held_out_skipped, difference, gain = estimate_means(columns, evaluation.resamples)
    measured = replace(
        recommendation,
        skipped=skipped,
        held_out_skipped=held_out_skipped,
        held_out_skips=held_out.skips,
        difference=difference,
        losing_slices=_find_losing_slices(evaluation, changes),
    )
    if recommendation.is_without_retrieval:  # no gate has to beat chance
        return measured
    beats_chance = _is_above_zero(gains, Z_CERTAIN)
    likely_beats_chance = _is_above_zero(gains, Z_LIKELY)
    return replace(measured, gain=gain, beats_chance=beats_chance, likely_beats_chance=likely_beats_chance)


def _compute_gains(changes: FloatArray, outcomes: GateOutcomes, held_out_skips: BoolArray) -> FloatArray:
    """Return how much more each answer changes than expected if as many searches were skipped at random.

    Args:
        changes: 1 if the gate (and the arbiter, if any) turned the answer right, -1 if wrong, 0 if neither.
        outcomes: Grades of both answers to each question.
        held_out_skips: Whether each search is skipped.
    """
    # Even with random skips, the arbiter chooses the answer after a search. So its changes are no merit of the gate.
    arbiter_changes = outcomes.retrieved_right.astype(float) - outcomes.open_book_right
    # A random skip replaces the answer after a search by the closed-book answer. That changes accuracy by this mean.
    mean_skip_change = float(outcomes.closed_book_right.mean() - outcomes.retrieved_right.mean())
    expected_changes = arbiter_changes + held_out_skips * mean_skip_change
    return np.asarray(changes - expected_changes)


def _is_above_zero(gains: FloatArray, z: float) -> bool:
    """Return whether the mean gain is more than `z` standard errors above 0. One lost answer is added, to be strict."""
    # A bootstrap interval is too lenient. With shuffled needs, where no gate is better than chance, the interval was above
    # 0 in 32 of 400 evaluations, but only 3 passed this test with `Z_CERTAIN` (on other runs than those it was picked on).
    n = len(gains)
    mean = float(gains.mean()) - 1 / n  # the added answer has a gain of -1
    squares = np.sum((gains - gains.mean()) ** 2) + 1
    standard_error = float(np.sqrt(squares / n / n))
    return mean > z * standard_error


def _set_level(
    evaluation: Evaluation, recommendation: Recommendation, *, is_guaranteed: bool = False
) -> Recommendation:
    """Set the level of a measured recommendation. In doubt, 'use' is lowered to 'try'."""
    if not is_guaranteed and not _has_enough_questions(evaluation):
        return recommendation
    level = _choose_level(recommendation, is_guaranteed=is_guaranteed)
    if level == "use" and recommendation.is_in_doubt:
        level = "try"
    return replace(recommendation, level=level)


def _choose_level(effect: Recommendation, *, is_guaranteed: bool) -> RecommendationLevel:
    """Decide from its measured effect whether to use a gate, try it, or leave it alone.

    Args:
        effect: The recommendation with its measured effect.
        is_guaranteed: Whether a stored guarantee of the gate holds here.

    Returns:
        'leave' if the gate skips hardly any searches, loses more than `max_loss` against always retrieving, or is no
        better than chance. 'use' if it is certain that none of the three is true, or guaranteed. Otherwise 'try'.
    """
    if (effect.held_out_skipped.value or 0.0) < MIN_SKIPPED:
        # A gate that skips hardly any searches is worth using only if an arbiter then corrects answers.
        gives_more_right_answers = (effect.difference.low or 0.0) > 0
        return "use" if is_guaranteed and gives_more_right_answers else "leave"
    loss = -(effect.difference.value or 0.0)
    if loss > effect.max_loss:
        return "leave"
    seems_better_than_chance = effect.gain.value is None or effect.gain.value > 0
    if is_guaranteed and seems_better_than_chance:
        return "use"
    # Of many gates, one looks slightly better than chance by luck. So the gain must be statistically likely.
    if not is_guaranteed and not (seems_better_than_chance and effect.likely_beats_chance):
        return "leave"
    return _choose_uncertain_level(effect)


def _choose_uncertain_level(effect: Recommendation) -> RecommendationLevel:
    """Choose the level of a gate whose estimated loss is small, by how reliable the estimates are."""
    if not effect.beats_chance:
        # A gate that may be no better than chance must not have a statistically significant loss, even if it is small.
        has_significant_loss = effect.difference.high is not None and effect.difference.high < 0
        return "leave" if has_significant_loss else "try"
    # Without an interval, the worst possible loss is assumed.
    lowest_difference = -1.0 if effect.difference.low is None else effect.difference.low
    return "use" if lowest_difference >= -effect.max_loss else "try"
