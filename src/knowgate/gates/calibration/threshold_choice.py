"""Outcomes of a threshold on graded questions, and the choice of a threshold by rate, accuracy or loss.

All thresholds without a guarantee are chosen here: by `calibrate`, by the tuned column of an evaluation and by fits.

- A question is retrieved for if its need is above the threshold, so all thresholds between two neighboring needs do the
  same. The midpoint is used, rounded to six digits so that it can be typed; needs that six digits do not distinguish
  get as many digits as necessary.
- ALWAYS_RETRIEVE (-1) is below every need; NEVER_RETRIEVE (1) is above none.
- Of equally good thresholds the one that retrieves least is chosen. If retrieval gains nothing, that is 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.stats.metrics import BoolArray, FloatArray

THRESHOLD_DIGITS = 6
NEVER_RETRIEVE = 1.0


@dataclass(frozen=True)
class GateOutcomes:
    """Needs of questions, and whether their answers are right.

    Attributes:
        needs: Need of each question.
        closed_right: Whether the closed-book answer is right.
        open_right: Whether the open-book answer is right.
        arbitrated_right: Whether the answer that an arbiter gives after retrieval is right; None without an arbiter.
    """

    needs: FloatArray
    closed_right: BoolArray
    open_right: BoolArray
    arbitrated_right: BoolArray | None = None

    def __post_init__(self) -> None:
        if not len(self.needs) == len(self.closed_right) == len(self.open_right) == len(self.retrieved_right):
            raise BadInput(
                f"there are {len(self.needs)} needs, {len(self.closed_right)} closed-book and {len(self.open_right)} "
                "open-book grades: give one of each per question."
            )

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def retrieved_right(self) -> BoolArray:
        """Whether the answer after retrieval is right."""
        return self.open_right if self.arbitrated_right is None else self.arbitrated_right

    @property
    def harmed(self) -> BoolArray:
        """Whether skipping loses a right answer: the open-book answer is right, the closed-book answer wrong."""
        return self.open_right & ~self.closed_right

    @property
    def harmed_anyway(self) -> BoolArray:
        """Whether retrieving loses it too, because the arbiter gives the closed-book answer; a subset of `harmed`."""
        return self.open_right & ~self.retrieved_right

    def select(self, rows: BoolArray) -> GateOutcomes:
        """Return the outcomes of some questions."""
        arbitrated = None if self.arbitrated_right is None else self.arbitrated_right[rows]
        return GateOutcomes(self.needs[rows], self.closed_right[rows], self.open_right[rows], arbitrated)


@dataclass(frozen=True)
class ThresholdResult:
    """Counts under one threshold.

    Attributes:
        n: Number of questions.
        retrieved: Questions that are retrieved for.
        right: Right answers with the gate, and the arbiter if there is one.
        right_always: Right answers if always retrieving.
        right_never: Right answers if never retrieving.
        harmed: Questions that only always retrieving answers right.
        gained: Questions that only the gate answers right.
        right_chosen: Right answers if always retrieving and then arbitrating; None without an arbiter.
    """

    n: int
    retrieved: int
    right: int
    right_always: int
    right_never: int
    harmed: int
    gained: int = 0
    right_chosen: int | None = None

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
        """Accuracy lost against always retrieving; negative if skipping gains."""
        return (self.right_always - self.right) / self.n

    def to_record(self) -> dict[str, Any]:
        """Return counts and rates as plain data."""
        rates = {"rate": self.rate, "accuracy": self.accuracy, "loss": self.loss, "risk": self.harmed / self.n}
        return {**asdict(self), **{name: round(value, 6) for name, value in rates.items()}}


def evaluate_threshold(outcomes: GateOutcomes, threshold: float) -> ThresholdResult:
    """Count what a gate with this threshold does to the questions."""
    _check_not_empty(len(outcomes))
    retrieve = outcomes.needs > threshold
    right = np.where(retrieve, outcomes.retrieved_right, outcomes.closed_right)
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(right.sum()),
        right_always=int(outcomes.open_right.sum()),
        right_never=int(outcomes.closed_right.sum()),
        harmed=int((outcomes.open_right & ~right).sum()),
        gained=int((right & ~outcomes.open_right).sum()),
        right_chosen=None if outcomes.arbitrated_right is None else int(outcomes.retrieved_right.sum()),
    )


def list_candidate_thresholds(needs: FloatArray) -> FloatArray:
    """List one threshold for each possible set of skipped questions, in increasing order."""
    values = np.unique(needs)
    return np.unique(np.concatenate([[ALWAYS_RETRIEVE], _midpoints(values[:-1], values[1:]), [NEVER_RETRIEVE]]))


def _midpoints(low: FloatArray, high: FloatArray) -> FloatArray:
    """Compute midpoints, rounded if the result still separates the two needs."""
    middle = (low + high) / 2
    rounded = np.round(middle, THRESHOLD_DIGITS)
    return np.select(
        [(low <= rounded) & (rounded < high), middle < high],
        [rounded, middle],
        default=low,  # adjacent floating-point numbers
    )


def choose_for_rate(needs: FloatArray, rate: float) -> float:
    """Choose the threshold whose retrieval rate is closest to `rate` without exceeding it."""
    if not 0 <= rate <= 1:
        raise BadSetting(f"retrieval_rate={rate} is not allowed: it must be between 0 and 1.")
    _check_not_empty(len(needs))
    thresholds = list_candidate_thresholds(needs)
    n_retrieved = len(needs) - np.searchsorted(np.sort(needs), thresholds, side="right")  # decreasing
    return float(thresholds[np.argmax(n_retrieved <= rate * len(needs) + 1e-9)])


def choose_for_accuracy(outcomes: GateOutcomes) -> float:
    """Choose the threshold with the most right answers; of several, the one that retrieves least."""
    _check_not_empty(len(outcomes))
    thresholds = list_candidate_thresholds(outcomes.needs)
    n_right = _count_right(outcomes, thresholds)
    return float(thresholds[np.flatnonzero(n_right == n_right.max())[-1]])


def choose_for_loss(outcomes: GateOutcomes, max_loss: float) -> float:
    """Choose the last threshold before the first one that loses more than `max_loss` accuracy.

    Later thresholds that happen to lose less again are not considered: the more thresholds are tried, the more of them
    look good by chance.
    """
    _check_not_empty(len(outcomes))
    thresholds = list_candidate_thresholds(outcomes.needs)
    losses = (outcomes.open_right.sum() - _count_right(outcomes, thresholds)) / len(outcomes)
    too_high = np.flatnonzero(losses > max_loss + 1e-9)
    return float(thresholds[max(0, too_high[0] - 1) if len(too_high) else -1])


def _check_not_empty(n: int) -> None:
    """Raise BadInput if there are no questions."""
    if not n:
        raise BadInput("there are no questions to choose or try a threshold on. Label some: knowgate label")


def _count_right(outcomes: GateOutcomes, thresholds: FloatArray) -> Any:
    """Count the right answers under each threshold."""
    order = np.argsort(outcomes.needs, kind="stable")
    gains = outcomes.closed_right[order].astype(int) - outcomes.retrieved_right[order].astype(int)
    n_skipped = np.searchsorted(outcomes.needs[order], thresholds, side="right")
    return outcomes.retrieved_right.sum() + np.concatenate([[0], np.cumsum(gains)])[n_skipped]
