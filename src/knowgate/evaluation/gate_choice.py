"""Choice of the gate and threshold that skip the most searches without losing too much accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.gates.calibration.threshold_choice import list_candidate_thresholds
from knowgate.stats.metrics import BoolArray, FloatArray

Z_BOUND = 1.645  # normal quantile of a one-sided 95 % bound


@dataclass(frozen=True)
class CorrectAnswers:
    """Whether the answers to each question are correct.

    Attributes:
        closed: The answer without passages.
        opened: The answer with passages.
        arbitrated: The answer that the arbiter chooses after retrieval; None without an arbiter.
    """

    closed: BoolArray
    opened: BoolArray
    arbitrated: BoolArray | None = None

    @property
    def retrieved(self) -> BoolArray:
        """Whether the answer that is given after retrieval is correct."""
        return self.opened if self.arbitrated is None else self.arbitrated

    def apply(self, choice: GateChoice, rows: BoolArray) -> BoolArray:
        """Return whether the final answers are correct if the chosen gate decides.

        Args:
            choice: The chosen gate and threshold.
            rows: Mask of the questions to return.
        """
        return np.where(choice.skips(rows), self.closed[rows], self.retrieved[rows])


@dataclass(frozen=True)
class GateChoice:
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
        """Return whether the search is skipped, for each question that the mask `rows` selects."""
        return self.needs[rows] <= self.threshold


@dataclass(frozen=True)
class SkipCounts:
    """Effects of skipping searches at each of several thresholds, as numbers of questions.

    Attributes:
        wins: Questions answered right that always retrieving answers wrong.
        losses: Questions answered wrong that always retrieving answers right.
        skipped: Questions whose search is skipped.
    """

    wins: NDArray[Any]
    losses: NDArray[Any]
    skipped: NDArray[Any]

    def lower_bounds(self, n: int) -> FloatArray:
        """Return a lower 95 % confidence bound of the change of accuracy at each threshold, against always retrieving.

        The change is measured on `n` questions. One loss is added to those counted: without it, a threshold with hardly
        any wins and losses would look safe by chance.
        """
        # A win changes a question by 1, a loss by -1. So the mean square of the changes is (wins + losses) / n.
        mean = (self.wins - self.losses - 1) / n
        variance = np.maximum((self.wins + self.losses + 1) / n - mean**2, 0)
        return np.asarray(mean - Z_BOUND * np.sqrt(variance / n))


def choose_gate(
    needs_by_gate: Mapping[str, FloatArray], answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateChoice | None:
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
    best: GateChoice | None = None
    for gate, needs in needs_by_gate.items():
        choice = _choose_threshold(gate, needs, answers, rows, max_loss)
        if choice is not None and (best is None or choice.skipped > best.skipped):
            best = choice
    return best


def _choose_threshold(
    gate: str, all_needs: FloatArray, answers: CorrectAnswers, rows: BoolArray, max_loss: float
) -> GateChoice | None:
    """Choose the threshold of a gate that skips the most searches and loses at most `max_loss` of accuracy.

    The loss, compared with always retrieving, is measured on the questions that the mask `rows` selects. It must be
    within the limit with 95 % confidence.

    Returns:
        The gate and the threshold. None if every threshold loses too much or skips nothing.
    """
    needs = all_needs[rows]
    thresholds = list_candidate_thresholds(needs)
    counts = _count_skips(needs, answers, rows, thresholds)
    is_acceptable = (counts.lower_bounds(len(needs)) >= -max_loss) & (counts.skipped > 0)
    if not is_acceptable.any():
        return None
    highest = np.flatnonzero(is_acceptable)[-1]  # thresholds are in ascending order
    return GateChoice(gate, all_needs, float(thresholds[highest]), float(counts.skipped[highest]) / len(needs))


def _count_skips(needs: FloatArray, answers: CorrectAnswers, rows: BoolArray, thresholds: FloatArray) -> SkipCounts:
    """Count wins, losses and skipped questions at each threshold, compared with always giving the open-book answer.

    Skipped questions get the closed-book answer. The others get the open-book answer, or the one that an arbiter chooses.
    """
    order = np.argsort(needs, kind="stable")
    n_skipped = np.searchsorted(needs[order], thresholds, side="right")  # number of needs at or below each threshold
    by_need = np.flatnonzero(rows)[order]  # indexes of the questions, from the lowest need up
    closed = answers.closed[by_need]
    opened = answers.opened[by_need]
    retrieved = answers.retrieved[by_need]
    wins = _count_changes(closed & ~opened, retrieved & ~opened, n_skipped)
    losses = _count_changes(opened & ~closed, opened & ~retrieved, n_skipped)
    return SkipCounts(wins, losses, n_skipped)


def _count_changes(if_skipped: BoolArray, if_retrieved: BoolArray, n_skipped: NDArray[Any]) -> NDArray[Any]:
    """Count how many answers change at each threshold: from wrong to right, or from right to wrong.

    Args:
        if_skipped: Whether the answer to each question changes if its search is skipped. The questions are sorted by
            need, a score from 0 to 1; the lowest comes first.
        if_retrieved: Whether it changes if its search is not skipped.
        n_skipped: Number of questions, those of lowest need, that are skipped at each threshold.
    """
    # Entry i of a sum is the count among the i questions of lowest need.
    skipped_sums = np.concatenate([[0], np.cumsum(if_skipped)])
    retrieved_sums = np.concatenate([[0], np.cumsum(if_retrieved)])
    n_changed_others = retrieved_sums[-1] - retrieved_sums[n_skipped]
    return np.asarray(skipped_sums[n_skipped] + n_changed_others)
