"""Choice of the gate and threshold that skip the most searches without losing too much accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    IntArray,
    count_gained,
    count_harmed,
    list_candidate_thresholds,
)
from knowgate.stats.metrics import BoolArray, FloatArray

Z_BOUND = 1.645  # normal quantile of a one-sided 95 % bound


@dataclass(frozen=True)
class GateSetting:
    """A chosen gate and threshold.

    Attributes:
        gate: Name of the gate.
        outcomes: Needs and grades of all questions.
        threshold: The search is skipped for questions whose need is at most this.
        skipped: Share of searches that are skipped on the questions that the choice was made on.
    """

    gate: str
    outcomes: GateOutcomes = field(repr=False)
    threshold: float
    skipped: float

    @property
    def skips(self) -> BoolArray:
        """Whether the search for each question is skipped."""
        return self.outcomes.needs <= self.threshold

    @property
    def right(self) -> BoolArray:
        """Whether the final answer to each question is correct."""
        return np.where(self.skips, self.outcomes.closed_book_right, self.outcomes.retrieved_right)


def choose_gate(outcomes_by_gate: Mapping[str, GateOutcomes], rows: BoolArray, max_loss: float) -> GateSetting | None:
    """Choose the gate and threshold that skip the most searches without losing too much accuracy.

    Args:
        outcomes_by_gate: By gate, its needs and the grades of all questions. If several gates skip equally many
            searches, the first is chosen.
        rows: Mask of the questions to choose on.
        max_loss: Maximum loss of accuracy compared with always retrieving, which must hold with 95 % confidence.

    Returns:
        The gate and its threshold. None if no gate can skip any search within the loss.
    """
    choices = [_choose_threshold(gate, outcomes, rows, max_loss) for gate, outcomes in outcomes_by_gate.items()]
    possible = [choice for choice in choices if choice is not None]
    return max(possible, key=lambda choice: choice.skipped, default=None)


def _choose_threshold(gate: str, outcomes: GateOutcomes, rows: BoolArray, max_loss: float) -> GateSetting | None:
    """Choose the threshold of a gate that skips most searches and loses at most `max_loss` of the accuracy.

    Returns None if every threshold loses too much on the questions in `rows`, or skips nothing.
    """
    selected = outcomes.select(rows)
    n = len(selected)
    thresholds = list_candidate_thresholds(selected.needs)
    n_skipped = np.searchsorted(np.sort(selected.needs), thresholds, side="right")  # needs at or below each threshold
    largest_loss = _bound_loss(count_harmed(selected, thresholds), count_gained(selected, thresholds), n)
    is_acceptable = (largest_loss <= max_loss) & (n_skipped > 0)
    if not is_acceptable.any():
        return None
    highest = np.flatnonzero(is_acceptable)[-1]  # thresholds are in ascending order
    return GateSetting(gate, outcomes, float(thresholds[highest]), float(n_skipped[highest]) / n)


def _bound_loss(n_lost: IntArray, n_gained: IntArray, n: int) -> FloatArray:
    """Return an upper 95 % bound of the accuracy loss, per threshold. One lost answer is added, for caution.

    Args:
        n_lost: For each threshold, how many answers are wrong with the gate, but right with always retrieving.
        n_gained: For each threshold, how many answers are right with the gate, but wrong with always retrieving.
        n: Number of all questions.
    """
    # A question loses 1, -1 or 0 answers. The square of that is 1 for a lost or a gained answer, and 0 for the others.
    mean = (n_lost - n_gained + 1) / n
    mean_square = (n_lost + n_gained + 1) / n
    variance = np.maximum(mean_square - mean**2, 0)
    return np.asarray(mean + Z_BOUND * np.sqrt(variance / n))
