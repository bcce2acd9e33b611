"""The one chooser of thresholds without a proof: by a wanted retrieval rate, by accuracy on the questions at hand, or
by a loss there that is not to be exceeded.

Whoever chooses a threshold chooses it here: `calibrate`, the tuned column of an evaluation, a fit. The rule:

- A question is retrieved for where its need is above the threshold, so between two neighbouring needs every threshold
  does the same. The one half-way is taken, to six digits: it can be typed and does not hang on a score's last bit.
  Needs that six digits do not tell apart get as many digits as it takes.
- ALWAYS (-1) lies below every need and retrieves for each question; 1 retrieves for none.
- Of equally good thresholds the one that retrieves least is taken. Where retrieving gains nothing on these questions,
  that is 1: never.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.stats.metrics import BoolArray, FloatArray


@dataclass(frozen=True)
class GateOutcomes:
    """Needs of questions, and whether their closed-book and open-book answers are right.

    given_right: whether what an arbiter gives after retrieval is; None where that is the open-book answer.
    """

    needs: FloatArray
    closed_right: BoolArray
    open_right: BoolArray
    given_right: BoolArray | None = None

    def __post_init__(self) -> None:
        if not len(self.needs) == len(self.closed_right) == len(self.open_right) == len(self.after):
            raise BadInput(
                f"there are {len(self.needs)} needs, {len(self.closed_right)} closed-book and {len(self.open_right)} "
                "open-book verdicts: give one of each per question."
            )

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def after(self) -> BoolArray:
        """Whether the answer after retrieval is right."""
        return self.open_right if self.given_right is None else self.given_right

    @property
    def harmed(self) -> BoolArray:
        """Skipping the question would lose a right answer: open-book right, closed-book wrong."""
        return self.open_right & ~self.closed_right

    @property
    def harmed_anyway(self) -> BoolArray:
        """Retrieving loses it, too: the arbiter gives the wrong answer from memory. Always among `harmed`."""
        return self.open_right & ~self.after

    def at(self, rows: BoolArray) -> GateOutcomes:
        """Of some of the questions."""
        given = None if self.given_right is None else self.given_right[rows]
        return GateOutcomes(self.needs[rows], self.closed_right[rows], self.open_right[rows], given)


@dataclass(frozen=True)
class ThresholdResult:
    """Counts under one threshold. `right`: with the gate, and the arbiter where there is one.

    harmed: wrong although always retrieving is right; gained: the other way round. right_chosen: always retrieving and
    then choosing, None without an arbiter.
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
        return self.retrieved / self.n

    @property
    def accuracy(self) -> float:
        return self.right / self.n

    @property
    def loss(self) -> float:
        """Accuracy lost against always retrieving; negative where skipping gains. Never above harmed / n."""
        return (self.right_always - self.right) / self.n

    def record(self) -> dict[str, Any]:
        """Counts and the shares people ask for, as plain data."""
        shares = {"rate": self.rate, "accuracy": self.accuracy, "loss": self.loss, "risk": self.harmed / self.n}
        return {**asdict(self), **{name: round(value, 6) for name, value in shares.items()}}


def evaluate_threshold(outcomes: GateOutcomes, threshold: float) -> ThresholdResult:
    """What the gate would have done to these questions."""
    if not len(outcomes):
        raise BadInput("there are no questions to try a threshold on. Label some: knowgate label")
    retrieve = outcomes.needs > threshold
    right = np.where(retrieve, outcomes.after, outcomes.closed_right)
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(right.sum()),
        right_always=int(outcomes.open_right.sum()),
        right_never=int(outcomes.closed_right.sum()),
        harmed=int((outcomes.open_right & ~right).sum()),
        gained=int((right & ~outcomes.open_right).sum()),
        right_chosen=None if outcomes.given_right is None else int(outcomes.after.sum()),
    )


THRESHOLD_DIGITS = 6
NEVER_RETRIEVE = 1.0  # no need is above it


def list_candidate_thresholds(needs: FloatArray) -> FloatArray:
    """From always retrieving to skipping everything, in rising order."""
    values = np.unique(needs)
    return np.unique(np.concatenate([[ALWAYS_RETRIEVE], _between(values[:-1], values[1:]), [NEVER_RETRIEVE]]))


def _between(low: FloatArray, high: FloatArray) -> FloatArray:
    """Half-way, rounded where that still skips the lower need and retrieves for the higher one."""
    middle = (low + high) / 2
    rounded = np.round(middle, THRESHOLD_DIGITS)
    return np.select(
        [(low <= rounded) & (rounded < high), middle < high],
        [rounded, middle],
        default=low,  # two numbers with none between them
    )


def choose_for_rate(needs: FloatArray, rate: float) -> float:
    """The threshold whose retrieval rate on these questions is closest to `rate` without being above it."""
    if not 0 <= rate <= 1:
        raise BadSetting(f"the retrieval rate is {rate}; it must be between 0 and 1.")
    if not len(needs):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = list_candidate_thresholds(needs)
    retrieved = len(needs) - np.searchsorted(np.sort(needs), thresholds, side="right")
    return float(thresholds[np.argmax(retrieved <= rate * len(needs) + 1e-9)])  # rates only fall along the thresholds


def choose_for_accuracy(outcomes: GateOutcomes) -> float:
    """The threshold with the most right answers on these questions; of several, the one that retrieves least."""
    if not len(outcomes):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = list_candidate_thresholds(outcomes.needs)
    right = _right(outcomes, thresholds)
    return float(thresholds[np.flatnonzero(right == right.max())[-1]])


def choose_for_loss(outcomes: GateOutcomes, most: float) -> float:
    """The threshold that retrieves least among those up to the first that loses more than `most` accuracy here.

    Not further, where a later one happens to lose less again: the more thresholds are tried, the more of them look good
    by luck.
    """
    if not len(outcomes):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = list_candidate_thresholds(outcomes.needs)
    lost = (outcomes.open_right.sum() - _right(outcomes, thresholds)) / len(outcomes)
    beyond = np.flatnonzero(lost > most + 1e-9)
    return float(thresholds[max(0, beyond[0] - 1) if len(beyond) else -1])


def _right(outcomes: GateOutcomes, thresholds: FloatArray) -> Any:
    """Right answers under each threshold."""
    order = np.argsort(outcomes.needs, kind="stable")
    gains = np.cumsum(outcomes.closed_right[order].astype(int) - outcomes.after[order].astype(int))
    skipped = np.searchsorted(outcomes.needs[order], thresholds, side="right")
    return outcomes.after.sum() + np.concatenate([[0], gains])[skipped]
