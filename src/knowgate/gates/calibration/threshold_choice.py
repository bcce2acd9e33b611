"""Choose thresholds: outcomes of a gate at each, net loss against always retrieving, and limits within which it is safe.

A question is lost if it is answered right with always retrieving, but wrong with the rule, and gained in the opposite
case. The net loss is the share of lost minus the share of gained questions. A rule is safe if its net loss, on questions
that it was not fitted on, is small and its upper confidence limit is not large either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.options import Options, option
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.artifacts.gate_manifest import ThresholdCounts
from knowgate.stats.metrics import BoolArray, FloatArray

IntArray = NDArray[np.int64]
RATE_STEPS = 40  # thresholds are tried at retrieval rates of 0, 2.5, 5, ... 100 %
MAX_REQUIRED_ROWS = 1 << 19  # more rows than anybody labels


class SafetyLimits(Options):
    """Limits on the accuracy lost by a threshold, compared with always retrieving."""

    max_loss: float = option(0.01, "Maximum measured net loss: lost minus gained right answers.", ge=0, lt=1)
    loss_bound: float = option(0.03, "Maximum net loss at the confidence level `confidence`.", gt=0, lt=1)
    confidence: float = option(0.95, "Confidence level of `loss_bound`.", gt=0.5, lt=1)

    def accepts(self, loss: NetLoss) -> bool:
        """Return whether the estimated loss and its upper confidence limit are within the limits."""
        return loss.mean <= self.max_loss + 1e-9 and loss.upper(self.confidence) <= self.loss_bound + 1e-9


@dataclass(frozen=True)
class NetLoss:
    """Numbers of questions that a rule for retrieval loses and gains, compared with always retrieving.

    Attributes:
        lost: Number of questions that are answered right with always retrieving, but wrong with the rule.
        gained: Number of questions that are answered wrong with always retrieving, but right with the rule.
        n: Number of all questions.
    """

    lost: int
    gained: int
    n: int

    @property
    def mean(self) -> float:
        """Estimated net loss; negative if the rule answers more questions right than always retrieving."""
        return (self.lost - self.gained) / self.n

    def upper(self, confidence: float = 0.95) -> float:
        """Return the upper confidence limit of the net loss, as a share."""
        return _upper_limit(self.lost / self.n, self.gained / self.n, self.n, confidence)

    def count_required_rows(self, limits: SafetyLimits) -> int | None:
        """Return how many questions could prove that the loss is within the limits. None: impossible, or too many."""
        lost, gained = self.lost / self.n, self.gained / self.n

        def is_enough(n: int) -> bool:
            return _upper_limit(lost, gained, n, limits.confidence) <= limits.loss_bound

        # The measured loss may equal `max_loss`, up to rounding. But it must be clearly below `loss_bound`: to show that a
        # loss is below a bound that it equals would take infinitely many questions.
        largest_loss = min(limits.max_loss + 1e-9, limits.loss_bound - 1e-6)
        is_possible = lost - gained <= largest_loss and is_enough(MAX_REQUIRED_ROWS)
        return find_smallest_count(is_enough) if is_possible else None


def find_smallest_count(is_enough: Callable[[int], bool]) -> int:
    """Find the smallest positive number with `is_enough(number)`. All larger numbers must be enough, too."""
    enough = 1
    while not is_enough(enough):
        enough *= 2
    candidates = range(enough // 2 + 1, enough)  # half of `enough` is too small
    return candidates.start + bisect_left(candidates, True, key=is_enough)


def count_net_losses(right: BoolArray, open_book_right: BoolArray) -> list[NetLoss]:
    """Count the questions that each rule loses and gains, compared with always retrieving.

    Args:
        right: Whether each rule answers each question right (rules x questions).
        open_book_right: Whether always retrieving answers each question right.
    """
    n_lost = np.count_nonzero(open_book_right & ~right, axis=1)
    n_gained = np.count_nonzero(right & ~open_book_right, axis=1)
    pairs = zip(n_lost.tolist(), n_gained.tolist(), strict=True)
    return [NetLoss(lost, gained, len(open_book_right)) for lost, gained in pairs]


def _upper_limit(lost: float, gained: float, n: int, confidence: float) -> float:
    """Return the upper confidence limit of the net loss (lost - gained).

    One lost question is added to avoid a zero limit.

    Args:
        lost: Share of questions that are answered right with always retrieving, but wrong with the gate.
        gained: Share of questions that are answered wrong with always retrieving, but right with the gate.
        n: Number of questions.
        confidence: Confidence of the limit, such as 0.95.
    """
    # The loss of a question is 1 if it is lost, -1 if it is gained, and else 0.
    mean, mean_square = lost - gained + 1 / n, lost + gained + 1 / n
    standard_error = math.sqrt(max(0.0, mean_square - mean**2) / n)
    return mean + NormalDist().inv_cdf(confidence) * standard_error


THRESHOLD_DIGITS = 6
NEVER_RETRIEVE = 1.0
MIN_SAVING = 0.05  # share of the searches that a threshold must save to be worth more label rows


@dataclass(frozen=True)
class GateOutcomes:
    """Needs of graded questions, and whether their answers with and without passages are right.

    Attributes:
        needs: Need for retrieval of each question (0 = the LLM knows, 1 = retrieve).
        closed_book_right: Whether the closed-book answer is right.
        open_book_right: Whether the open-book answer is right.
        arbitrated_right: Whether the answer that an arbiter gives after retrieval is right; None without an arbiter.
    """

    needs: FloatArray
    closed_book_right: BoolArray
    open_book_right: BoolArray
    arbitrated_right: BoolArray | None = None

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def retrieved_right(self) -> BoolArray:
        """Whether the answer after retrieval is right: the arbiter's choice or, without one, the open-book answer."""
        return self.open_book_right if self.arbitrated_right is None else self.arbitrated_right

    @property
    def harmed_if_skipped(self) -> BoolArray:
        """Whether skipping retrieval loses a right answer: only the answer with passages is right."""
        return self.open_book_right & ~self.closed_book_right

    @property
    def harmed_if_retrieved(self) -> BoolArray:
        """Whether a right answer with passages is lost after retrieval, because the arbiter picks the other answer."""
        return self.open_book_right & ~self.retrieved_right

    def select(self, rows: BoolArray) -> GateOutcomes:
        """Return the outcomes of the questions that `rows` marks as True."""
        arbitrated = None if self.arbitrated_right is None else self.arbitrated_right[rows]
        return GateOutcomes(self.needs[rows], self.closed_book_right[rows], self.open_book_right[rows], arbitrated)


def check_retrieval_helps(outcomes: GateOutcomes) -> None:
    """Raise BadInput if retrieval corrects no wrong answer. Every threshold would then be equally safe."""
    if not outcomes.harmed_if_skipped.any():
        raise BadInput(
            f"retrieval corrected none of the {len(outcomes)} answers, so skipping it loses nothing. Check the "
            "passages with `knowgate report`, or use the gate 'never'."
        )


@dataclass(frozen=True, kw_only=True)
class ThresholdResult(ThresholdCounts):
    """Counts and rates of a gate with one threshold on graded questions."""

    @property
    def rate(self) -> float:
        """Share of questions that are retrieved for."""
        return self.retrieved / self.n

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.n

    @property
    def loss(self) -> float:
        """Accuracy lost against always retrieving; negative if the gate has a higher accuracy."""
        return (self.right_always - self.right) / self.n

    def to_record(self) -> dict[str, Any]:
        """Return counts and rates for `gate.json`. 'risk' is the share of harmed questions."""
        rates = {"rate": self.rate, "accuracy": self.accuracy, "loss": self.loss, "risk": self.harmed / self.n}
        return {**asdict(self), **{name: round(value, 6) for name, value in rates.items()}}


def evaluate_threshold(outcomes: GateOutcomes, threshold: float) -> ThresholdResult:
    """Count retrieved questions and right answers of a gate with this threshold.

    Raises:
        BadInput: There are no questions.
    """
    _check_not_empty(len(outcomes))
    retrieve = outcomes.needs > threshold
    right = np.where(retrieve, outcomes.retrieved_right, outcomes.closed_book_right)
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(right.sum()),
        right_always=int(outcomes.open_book_right.sum()),
        right_never=int(outcomes.closed_book_right.sum()),
        harmed=int((outcomes.open_book_right & ~right).sum()),
        gained=int((right & ~outcomes.open_book_right).sum()),
        right_chosen=None if outcomes.arbitrated_right is None else int(outcomes.arbitrated_right.sum()),
    )


def list_candidate_thresholds(needs: FloatArray) -> FloatArray:
    """List the thresholds that split the questions in different ways, in increasing order.

    These are the two ends, and a threshold between each two neighboring needs.
    """
    values = np.unique(needs)
    return np.unique(np.concatenate([[ALWAYS_RETRIEVE], _midpoints(values[:-1], values[1:]), [NEVER_RETRIEVE]]))


def _midpoints(low: FloatArray, high: FloatArray) -> FloatArray:
    """Compute a threshold between each two neighboring needs: low <= threshold < high."""
    middle = (low + high) / 2
    rounded = np.round(middle, THRESHOLD_DIGITS)
    # The rounded midpoint is preferred, then the exact midpoint. If `low` and `high` are adjacent floating-point numbers,
    # the midpoint is equal to `high`, so that only `low` is left.
    return np.select([(low <= rounded) & (rounded < high), middle < high], [rounded, middle], default=low)


def choose_for_rate(needs: FloatArray, rate: float) -> float:
    """Choose the lowest threshold with a retrieval rate of at most `rate`.

    Raises:
        BadSetting: `rate` is not between 0 and 1.
        BadInput: There are no questions.
    """
    if not 0 <= rate <= 1:
        raise BadSetting(f"retrieval_rate={rate} is not allowed: it must be between 0 and 1.")
    _check_not_empty(len(needs))
    thresholds = list_candidate_thresholds(needs)
    n_retrieved = len(needs) - _count_skipped(needs, thresholds)
    is_within_budget = n_retrieved <= rate * len(needs) + 1e-9
    return float(thresholds[np.argmax(is_within_budget)])  # argmax returns the first True


def choose_for_accuracy(outcomes: GateOutcomes) -> float:
    """Choose the threshold with the most right answers. Of equally good thresholds, the highest is chosen."""
    _check_not_empty(len(outcomes))
    thresholds = list_candidate_thresholds(outcomes.needs)
    n_right = _count_by_threshold(outcomes.needs, outcomes.closed_book_right, outcomes.retrieved_right, thresholds)
    best = thresholds[n_right == n_right.max()]
    return float(best.max())


def choose_safe(outcomes: GateOutcomes, limits: SafetyLimits) -> float:
    """Choose the highest safe threshold below the first unsafe one.

    A threshold is safe if it loses few right answers, compared with always retrieving.
    """
    _check_not_empty(len(outcomes))
    thresholds = list_candidate_thresholds(outcomes.needs)
    losses = _count_losses(outcomes, thresholds)
    chosen = thresholds[0]  # the first threshold always retrieves, so it counts as safe
    for threshold, loss in zip(thresholds[1:], losses[1:], strict=True):
        if not limits.accepts(loss):
            break
        chosen = threshold
    return float(chosen)


def count_required_rows(outcomes: GateOutcomes, limits: SafetyLimits) -> int | None:
    """Return the smallest number of questions that could prove a threshold to be safe; None if no number could.

    Only thresholds that skip more than a few searches (`MIN_SAVING`) are tried.
    """
    thresholds = list_candidate_thresholds(outcomes.needs)
    saves_enough = _count_skipped(outcomes.needs, thresholds) / len(outcomes) > MIN_SAVING
    losses = _count_losses(outcomes, thresholds[saves_enough])
    counts = [loss.count_required_rows(limits) for loss in losses]
    return min((count for count in counts if count is not None), default=None)


def _count_losses(outcomes: GateOutcomes, thresholds: FloatArray) -> list[NetLoss]:
    """Count the questions that each threshold loses and gains against always retrieving."""
    lost = count_harmed(outcomes, thresholds).tolist()
    gained = count_gained(outcomes, thresholds).tolist()
    return [NetLoss(n_lost, n_gained, len(outcomes)) for n_lost, n_gained in zip(lost, gained, strict=True)]


def count_harmed(outcomes: GateOutcomes, thresholds: FloatArray) -> IntArray:
    """Count the harmed questions for each threshold.

    A harmed question is answered wrong at the threshold, but right by always retrieving.
    """
    return _count_by_threshold(outcomes.needs, outcomes.harmed_if_skipped, outcomes.harmed_if_retrieved, thresholds)


def count_gained(outcomes: GateOutcomes, thresholds: FloatArray) -> IntArray:
    """Count the gained questions for each threshold.

    A gained question is answered right at the threshold, but wrong by always retrieving.
    """
    always_wrong = ~outcomes.open_book_right  # always retrieving gives the open-book answer
    gained_if_skipped = outcomes.closed_book_right & always_wrong
    gained_if_retrieved = outcomes.retrieved_right & always_wrong
    return _count_by_threshold(outcomes.needs, gained_if_skipped, gained_if_retrieved, thresholds)


def _count_by_threshold(
    needs: FloatArray, holds_if_skipped: BoolArray, holds_if_retrieved: BoolArray, thresholds: FloatArray
) -> IntArray:
    """Count for each threshold the questions with some property, such as a right answer.

    Args:
        needs: Need for retrieval of each question. Retrieval is skipped if the need is at most the threshold.
        holds_if_skipped: Whether each question has the property if retrieval is skipped.
        holds_if_retrieved: Whether each question has the property after retrieval.
        thresholds: The thresholds.
    """
    # All questions that have the property after retrieval, except those for which retrieval is skipped.
    n_retrieved: IntArray = holds_if_retrieved.sum() - _count_skipped(needs[holds_if_retrieved], thresholds)
    return _count_skipped(needs[holds_if_skipped], thresholds) + n_retrieved


def _count_skipped(needs: FloatArray, thresholds: FloatArray) -> IntArray:
    """Count for each threshold the needs that are at most as high, so that retrieval is skipped."""
    return np.asarray(np.searchsorted(np.sort(needs), thresholds, side="right"))


def _check_not_empty(n: int) -> None:
    """Raise BadInput if there are no questions."""
    if not n:
        raise BadInput("there are no questions to choose or test a threshold with. Label some with `knowgate label`.")


def list_rate_thresholds(needs: FloatArray) -> list[float]:
    """List thresholds that retrieve for about 2.5, 5, ... 97.5 % of the questions."""
    values = np.unique(needs)
    if len(values) < 2:
        return []
    quantiles = np.quantile(needs, np.arange(1, RATE_STEPS) / RATE_STEPS)
    # For each quantile, the position in `values` of the first need above it.
    first_above = np.clip(np.searchsorted(values, quantiles, side="right"), 1, len(values) - 1)
    midpoints = (values[first_above - 1] + values[first_above]) / 2
    return [float(threshold) for threshold in np.unique(midpoints)]
