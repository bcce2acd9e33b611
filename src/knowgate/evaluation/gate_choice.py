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
class CorrectAnswers:
    """Whether the answers to each question are correct.

    Attributes:
        closed_book_right: The answer without passages (closed-book).
        open_book_right: The answer with passages (open-book).
        arbitrated: The answer that the arbiter chooses after retrieval; None without an arbiter.
    """

    closed_book_right: BoolArray
    open_book_right: BoolArray
    arbitrated: BoolArray | None = None

    @property
    def retrieved(self) -> BoolArray:
        """Whether the answer that is given after retrieval is correct."""
        return self.open_book_right if self.arbitrated is None else self.arbitrated

    def apply(self, choice: GateSetting, rows: BoolArray) -> BoolArray:
        """Return whether the final answers are correct if the chosen gate decides.

        Args:
            choice: The chosen gate and threshold.
            rows: Mask of the questions to return.
        """
        return np.where(choice.skips(rows), self.closed_book_right[rows], self.retrieved[rows])


@dataclass(frozen=True)
class GateSetting:
    """A chosen gate and threshold.

    Attributes:
        gate: Name of the gate.
        needs: Need for retrieval that the gate gives to each question (0 = the LLM knows, 1 = retrieve).
        threshold: The search is skipped for questions whose need is at most this.
        skipped: Share of searches that are skipped on the questions that the choice was made on.
    """

    gate: str
    needs: FloatArray = field(repr=False)
    threshold: float
    skipped: float

    def skips(self, rows: BoolArray) -> BoolArray:
        """Return whether the search is skipped, for each question in `rows`."""
        return self.needs[rows] <= self.threshold


def choose_gate(
    needs_by_gate: Mapping[str, FloatArray], answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateSetting | None:
    """Choose the gate and threshold that skip the most searches without losing too much accuracy.

    Args:
        needs_by_gate: By gate, the need for retrieval that it gives to each question (0 = the LLM knows, 1 = retrieve).
            If several gates skip equally many, the first is chosen.
        answers: Grades of both answers to each question.
        rows: Mask of the questions to choose on.
        max_loss: Maximum loss of accuracy compared with always retrieving, which must hold with 95 % confidence.

    Returns:
        The gate and its threshold. None if no gate can skip any search within the loss.
    """
    choices = [_choose_threshold(gate, needs, answers, rows, max_loss) for gate, needs in needs_by_gate.items()]
    possible = [choice for choice in choices if choice is not None]
    return max(possible, key=lambda choice: choice.skipped, default=None)


def _choose_threshold(
    gate: str, all_needs: FloatArray, answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateSetting | None:
    """Choose the threshold of a gate that skips most searches and loses at most `max_loss` of the accuracy.

    Only the questions in `rows` are used.

    Returns:
        The gate and the threshold. None if every threshold loses too much or skips nothing.
    """
    grades = (answers.closed_book_right, answers.open_book_right, answers.arbitrated)
    outcomes = GateOutcomes(all_needs, *grades).select(rows)
    n = len(outcomes)
    thresholds = list_candidate_thresholds(outcomes.needs)
    n_skipped = np.searchsorted(np.sort(outcomes.needs), thresholds, side="right")  # needs at or below each threshold
    largest_loss = _bound_loss(count_harmed(outcomes, thresholds), count_gained(outcomes, thresholds), n)
    is_acceptable = (largest_loss <= max_loss) & (n_skipped > 0)
    if not is_acceptable.any():
        return None
    highest = np.flatnonzero(is_acceptable)[-1]  # thresholds are in ascending order
    return GateSetting(gate, all_needs, float(thresholds[highest]), float(n_skipped[highest]) / n)


def _bound_loss(n_lost: IntArray, n_gained: IntArray, n: int) -> FloatArray:
    """Return an upper 95 % bound of the accuracy loss, per threshold. One loss is added, for caution.

    Args:
        n_lost: Number of questions that only always retrieving answers right, for each threshold.
        n_gained: Number of questions that always retrieving answers wrong and the gate right, for each threshold.
        n: Number of all questions.
    """
    # The loss of a question is 1, -1 or 0. So the mean of its square is the share of changed questions.
    mean = (n_lost - n_gained + 1) / n
    mean_square = (n_lost + n_gained + 1) / n
    variance = np.maximum(mean_square - mean**2, 0)
    return np.asarray(mean + Z_BOUND * np.sqrt(variance / n))
