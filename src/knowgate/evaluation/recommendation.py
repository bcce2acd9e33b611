"""What to do after an evaluation: which gate, at which threshold, and how far that is shown. Says so if none will do.

A gate whose stored guarantee holds here is taken at its own threshold, unless what is measured speaks against it. Else
gate and threshold are chosen on these questions (see `choosing`), aiming at half the loss that is accepted, for what is
best where it was chosen is a little worse elsewhere. What the choice is worth is measured by repeating it: five times
without a fifth of the questions, each time tried on that fifth. So no question speaks for a choice it had a part in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.core.validation import check_number
from knowgate.data.splits import hash_to_unit
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.gates.calibration.threshold_choice import list_candidate_thresholds
from knowgate.stats.bootstrap import Estimate, estimate_mean, estimate_means
from knowgate.stats.metrics import BoolArray, FloatArray

Z_BOUND = 1.645  # the normal quantile of a one-sided 95 % bound


class SkipCounts(NamedTuple):
    """Under each of several thresholds."""

    wins: NDArray[Any]
    losses: NDArray[Any]
    skipped: NDArray[Any]


@dataclass(frozen=True)
class GateOption:
    """A gate whose threshold may be moved; only_at: for one that decides in more than one step, its own threshold."""

    gate: str
    needs: FloatArray = field(repr=False)
    right: BoolArray = field(repr=False)
    only_at: float | None = None


@dataclass(frozen=True)
class GateChoice:
    """A gate at a threshold, and what share of the questions it was chosen on it skips."""

    lever: GateOption
    threshold: float
    skipped: float

    def skips(self, rows: BoolArray) -> BoolArray:
        return self.lever.needs[rows] <= self.threshold


@dataclass(frozen=True)
class CorrectAnswers:
    """Which questions are answered right without passages and with them."""

    closed: BoolArray
    opened: BoolArray

    def right(self, choice: GateChoice, rows: BoolArray) -> BoolArray:
        """The final answers of a gate to some of the questions."""
        if choice.lever.only_at is not None:
            return choice.lever.right[rows]
        return np.where(choice.skips(rows), self.closed[rows], self.opened[rows])


def choose_gate(
    levers: Sequence[GateOption], answered: CorrectAnswers, rows: BoolArray, aim: float
) -> GateChoice | None:
    """The one that skips most of these questions within the loss aimed at; None where none skips anything."""
    choices = [choice for lever in levers if (choice := _laxest(lever, answered, rows, aim)) is not None]
    return max(choices, key=lambda choice: choice.skipped, default=None)


def _laxest(lever: GateOption, answered: CorrectAnswers, rows: BoolArray, aim: float) -> GateChoice | None:
    needs = lever.needs[rows]
    thresholds = list_candidate_thresholds(needs) if lever.only_at is None else np.array([lever.only_at])
    count = _moved if lever.only_at is None else _fixed
    counts = count(lever, answered, rows, thresholds)
    will_do = np.flatnonzero((_least(counts, len(needs)) >= -aim) & (counts.skipped > 0))
    if not len(will_do):
        return None
    return GateChoice(lever, float(thresholds[will_do[-1]]), float(counts.skipped[will_do[-1]]) / len(needs))


def _least(counts: SkipCounts, n: int) -> FloatArray:
    """The lower bound of what is gained."""
    mean = (counts.wins - counts.losses - 1) / n
    bound: FloatArray = mean - Z_BOUND * np.sqrt(np.maximum((counts.wins + counts.losses + 1) / n - mean**2, 0) / n)
    return bound


def _moved(lever: GateOption, answered: CorrectAnswers, rows: BoolArray, thresholds: FloatArray) -> SkipCounts:
    needs, closed, opened = lever.needs[rows], answered.closed[rows], answered.opened[rows]
    order = np.argsort(needs, kind="stable")
    skipped = np.searchsorted(needs[order], thresholds, side="right")
    wins, losses = (np.concatenate([[0], np.cumsum(one[order])]) for one in (closed & ~opened, opened & ~closed))
    return SkipCounts(wins[skipped], losses[skipped], skipped)


def _fixed(lever: GateOption, answered: CorrectAnswers, rows: BoolArray, thresholds: FloatArray) -> SkipCounts:
    right, opened = lever.right[rows], answered.opened[rows]
    sums = (right & ~opened, opened & ~right, lever.needs[rows] <= thresholds[0])
    return SkipCounts(*(np.array([one.sum()]) for one in sums))


RecommendationLevel = Literal["use", "try", "leave", "unknown"]
MAX_LOSS = 0.02
FOLDS = 5
MIN_QUESTIONS = 100  # questions; on fewer, a loss of a few points cannot be told from luck
MIN_SKIPPED = 0.02  # share of searches; a gate that skips less is not worth its upkeep
Z_CERTAIN = 2.576  # standard errors: the normal quantile of a one-sided 99.5 % bound
Z_LIKELY = 1.96  # the same of 97.5 %: less than that is not even worth a try
NEVER = "never"
UNKNOWN_ESTIMATE = Estimate(None)


@dataclass(frozen=True)
class Recommendation:
    """light: how sure it is. skipped: at this threshold. The others are measured on questions it was not chosen on.

    tried: share skipped there. difference: of accuracy, against always retrieving. gain: against skipping as many
    searches at random; not defined for doing without retrieval. agreed: in how many of the rounds the same gate was
    chosen; 0 where nothing had to be chosen. guarantee: in words. skips, right: of every question, at this threshold.
    """

    light: RecommendationLevel
    n: int
    max_loss: float
    gate: str | None = None
    threshold: float | None = None
    skipped: Estimate = UNKNOWN_ESTIMATE
    tried: Estimate = UNKNOWN_ESTIMATE
    difference: Estimate = UNKNOWN_ESTIMATE
    gain: Estimate = UNKNOWN_ESTIMATE
    beats_chance: bool = True  # nothing speaks against it; False where a gain is not certain
    agreed: int = 0
    guarantee: str = ""
    chosen_on: int = 0  # of these questions; the guarantee rests on them
    skips: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    right: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)

    @property
    def does_without(self) -> bool:
        """No gate: no question is retrieved for."""
        return self.gate == NEVER

    @property
    def is_worth_it(self) -> bool:
        return self.light in ("use", "try")


def recommend(evaluation: Evaluation, max_loss: float = MAX_LOSS) -> Recommendation:
    """max_loss: share of the answers that fewer searches may cost."""
    check_number(max_loss, "the largest loss")
    trial = evaluation.trial
    n = len(trial.rows)
    if trial.open_right is None:
        return Recommendation("unknown", n, max_loss)
    answered = CorrectAnswers(trial.closed_right, trial.open_right)
    guaranteed = _guaranteed(evaluation)
    promised = _as_promised(evaluation, guaranteed, answered) if guaranteed else None
    if promised is not None and promised.is_worth_it:
        return promised
    choice = choose_gate(_levers(evaluation), answered, np.ones(n, dtype=bool), max_loss / 2)
    if choice is None:
        return Recommendation("unknown" if _different(evaluation) < MIN_QUESTIONS else "leave", n, max_loss)
    return _as_measured(evaluation, choice, answered, max_loss)


def recommendation_to_dict(found: Recommendation) -> dict[str, Any]:
    """Without what it does to each question."""
    return {name: value for name, value in asdict(found).items() if name not in ("skips", "right")}


def _levers(evaluation: Evaluation) -> list[GateOption]:
    """Doing without retrieval, and every gate that ranks; the first of equals wins."""
    n = len(evaluation.trial.rows)
    never = GateOption(NEVER, np.zeros(n), evaluation.trial.closed_right)
    return [never, *(_lever(evaluation, gate) for gate in evaluation.gates if "auroc" in gate.measures)]


def _lever(evaluation: Evaluation, gate: GateResult) -> GateOption:
    """A gate whose answers are not just those of its threshold stays where it is."""
    trial = evaluation.trial
    plain = np.where(gate.needs > gate.threshold, trial.always_right, trial.closed_right)
    return GateOption(gate.gate, gate.needs, gate.right, None if (plain == gate.right).all() else gate.threshold)


# --- with a guarantee -----------------------------------------------------------------------------


def _guaranteed(evaluation: Evaluation) -> GateResult | None:
    """Of the gates whose guarantee holds here, the one that skips most: what is right has no say in that."""
    held = [
        gate for gate in evaluation.gates if gate.gate in evaluation.promises and evaluation.promises[gate.gate].holds
    ]
    return min(held, key=lambda gate: float((gate.needs > gate.threshold).mean()), default=None)


def _as_promised(evaluation: Evaluation, gate: GateResult, answered: CorrectAnswers) -> Recommendation:
    """The loss that is accepted is the one it was calibrated for."""
    skips, promised = gate.needs <= gate.threshold, evaluation.promises[gate.gate]
    found = _measure(evaluation, answered, skips, gate.right.astype(float) - answered.opened)
    return Recommendation(
        _light(found, promised.loss, is_proven=True), len(skips), promised.loss, gate.gate, gate.threshold,
        found.skipped, found.skipped, found.difference, found.gain, found.beats_chance,
        guarantee=promised.words, chosen_on=promised.chosen_on, skips=skips, right=gate.right,
    )  # fmt: skip


# --- chosen here ----------------------------------------------------------------------------------


def _as_measured(
    evaluation: Evaluation, choice: GateChoice, answered: CorrectAnswers, max_loss: float
) -> Recommendation:
    rounds = _rounds(evaluation, answered, max_loss / 2)
    n = len(answered.closed)
    skips, changes, every = np.zeros(n, dtype=bool), np.zeros(n), np.ones(n, dtype=bool)
    for fold, chosen in rounds:
        if chosen is not None:
            skips[fold] = chosen.skips(fold)
            changes[fold] = answered.right(chosen, fold).astype(float) - answered.opened[fold]
    found = _measure(evaluation, answered, skips, changes)
    if choice.lever.gate == NEVER:
        found = _unchosen(found)
    elif not found.may_beat_it and (without := _doing_without(evaluation, answered, max_loss)).is_worth_it:
        return without
    own = choice.skips(every)
    light = _light(found, max_loss) if _different(evaluation) >= MIN_QUESTIONS else "unknown"
    return Recommendation(
        light, n, max_loss, choice.lever.gate, choice.threshold,
        estimate_mean(own.astype(float), evaluation.resamples),
        found.skipped, found.difference, found.gain, found.beats_chance,
        agreed=Counter(chosen.lever.gate for _, chosen in rounds if chosen)[choice.lever.gate],
        skips=own, right=answered.right(choice, every),
    )  # fmt: skip


def _doing_without(evaluation: Evaluation, answered: CorrectAnswers, max_loss: float) -> Recommendation:
    """No search at all: nothing was chosen here, so all questions may speak for it."""
    n = len(answered.closed)
    skips, changes = np.ones(n, dtype=bool), answered.closed.astype(float) - answered.opened
    found = _unchosen(_measure(evaluation, answered, skips, changes))
    light = _light(found, max_loss) if _different(evaluation) >= MIN_QUESTIONS else "unknown"
    return Recommendation(
        light, n, max_loss, NEVER, 1.0, found.skipped, found.skipped, found.difference, skips=skips,
        right=answered.closed,
    )  # fmt: skip


def _different(evaluation: Evaluation) -> int:
    """A question asked many times is still one."""
    return len(np.unique(evaluation.trial.question_fingerprints))


def _rounds(
    evaluation: Evaluation, answered: CorrectAnswers, aim: float
) -> Sequence[tuple[BoolArray, GateChoice | None]]:
    """Each fifth of the questions with what is chosen on the others. The same question is always in one fifth."""
    shares = (hash_to_unit("recommend", str(key)) for key in evaluation.trial.question_fingerprints)
    places = np.array([int(share * FOLDS) for share in shares])
    levers = _levers(evaluation)
    folds = [places == number for number in range(FOLDS) if (places == number).any() and (places != number).any()]
    return [(fold, choose_gate(levers, answered, ~fold, aim)) for fold in folds]


# --- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """Per question, with intervals. beats_chance: the gain is there for certain; may_beat_it: it is likely."""

    skipped: Estimate
    difference: Estimate
    gain: Estimate
    beats_chance: bool
    may_beat_it: bool


def _measure(evaluation: Evaluation, answered: CorrectAnswers, skips: BoolArray, changes: FloatArray) -> _Found:
    """changes: of the answer against that of always retrieving, per question."""
    by_chance = float(answered.closed.mean() - answered.opened.mean())  # what a skip changes, on average
    gains = changes - skips * by_chance
    columns = [skips.astype(float), changes, gains]
    skipped, difference, gain = estimate_means(columns, evaluation.resamples)
    return _Found(skipped, difference, gain, _is_above(gains, Z_CERTAIN), _is_above(gains, Z_LIKELY))


def _unchosen(found: _Found) -> _Found:
    """Of doing without retrieval: there is nothing to choose better than chance."""
    return replace(found, gain=UNKNOWN_ESTIMATE, beats_chance=True, may_beat_it=True)


def _is_above(gains: FloatArray, errors: float) -> bool:
    """With one loss added, the mean is more than so many standard errors above 0.

    Gains are rare, and a choice is behind them: with shuffled needs 32 of 400 evaluations came out as worth using by a
    bootstrap interval above 0, and 3 by this. Of three cutoffs (1.96, 2.33, 2.58) the strictest was kept after trying
    them on shuffles of four recorded runs; those figures are of four other runs.
    """
    n = len(gains)
    error = float(np.sqrt((np.sum((gains - gains.mean()) ** 2) + 1) / n / n))
    return float(gains.mean()) - 1 / n > errors * error


def _light(found: _Found, max_loss: float, *, is_proven: bool = False) -> RecommendationLevel:
    chosen_well = found.gain.value is None or found.gain.value > 0
    loss = -(found.difference.value or 0.0)
    if (found.skipped.value or 0.0) < MIN_SKIPPED or loss > max_loss or not (chosen_well or is_proven):
        return "leave"
    if not (found.may_beat_it or is_proven):
        return "leave"  # among many gates one looks a little better than chance, by chance
    if is_proven and chosen_well:
        return "use"
    if not found.beats_chance and found.difference.high is not None and found.difference.high < 0:
        return "leave"  # it loses for certain, and chance might lose as little
    return "use" if found.beats_chance and _lowest(found.difference) >= -max_loss else "try"


def _lowest(found: Estimate) -> float:
    return -1.0 if found.low is None else found.low
