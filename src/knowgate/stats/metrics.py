"""Metrics of rankings and probabilities, and the logistic function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

PROBABILITY_FLOOR = 1e-6  # probabilities are clipped this far from 0 and 1, so that their logits are finite


@overload
def sigmoid(z: float) -> float: ...
@overload
def sigmoid(z: NDArray[Any]) -> NDArray[Any]: ...
def sigmoid(z: float | NDArray[Any]) -> float | NDArray[Any]:
    """Return the logistic function 1 / (1 + e^-z) of a number or an array, without overflow warnings."""
    with np.errstate(over="ignore"):  # e^-z overflows to infinity, which gives the correct limit 0
        p = 1 / (1 + np.exp(-np.asarray(z)))
    return float(p) if p.ndim == 0 else p


@overload
def logit(p: float, floor: float = PROBABILITY_FLOOR) -> float: ...
@overload
def logit(p: NDArray[Any], floor: float = PROBABILITY_FLOOR) -> NDArray[Any]: ...
def logit(p: float | NDArray[Any], floor: float = PROBABILITY_FLOOR) -> float | NDArray[Any]:
    """Return the inverse of `sigmoid`, log(p / (1 - p)), with p clipped to [floor, 1 - floor]."""
    clipped = np.clip(p, floor, 1 - floor)
    z = np.log(clipped / (1 - clipped))
    return float(z) if z.ndim == 0 else z


FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
WeightMatrix = NDArray[np.floating[Any]]  # float32 for resamples, to save memory; float64 for unit weights
N_ECE_BINS = 15
ECE_BLOCK_SIZE = 100_000  # questions whose bins are in memory at once


def weighted_mean(weights: WeightMatrix, values: NDArray[Any]) -> FloatArray:
    """Return the weighted mean over the questions for each row of weights.

    Args:
        weights: Weights (resamples x questions): how often each resample draws each question.
        values: One value per question, or a table (questions x columns) to average each column.
    """
    sums = (weights @ values.astype(weights.dtype)).astype(np.float64)
    totals = weights.sum(axis=1, dtype=np.float64)
    if values.ndim == 2:
        totals = totals[:, None]  # divides every column of the sums
    return safe_divide(sums, totals)


def weighted_accuracy(weights: WeightMatrix, needed: BoolArray, needs: FloatArray) -> FloatArray:
    """Return the accuracy of predicting retrieval for needs above 0.5.

    Args:
        weights: Weights of the questions in each resample (resamples x questions).
        needed: Whether each question really needed retrieval.
        needs: Predicted need for retrieval of each question, from 0 to 1.

    Returns:
        One value per resample.
    """
    return weighted_mean(weights, (needs > 0.5) == needed)


def weighted_brier(weights: WeightMatrix, needed: BoolArray, needs: FloatArray) -> FloatArray:
    """Return the Brier score (mean squared error of the prediction) of each resample.

    Args:
        weights: Weights of the questions in each resample (resamples x questions).
        needed: The truth: whether each question really needed retrieval.
        needs: Predicted need for retrieval of each question, from 0 to 1.
    """
    return weighted_mean(weights, (needs - needed) ** 2)


def weighted_ece(weights: WeightMatrix, needed: BoolArray, needs: FloatArray) -> FloatArray:
    """Return the expected calibration error (ECE) of each bootstrap resample.

    Args:
        weights: How often each resample draws each question (resamples x questions).
        needed: The truth: whether each question really needed retrieval.
        needs: Predicted need for retrieval of each question, from 0 to 1.
    """
    # For each resample (row) and bin (column), the sum of prediction minus truth.
    gaps: NDArray[Any] = np.zeros((len(weights), N_ECE_BINS), dtype=weights.dtype)
    for start in range(0, len(needs), ECE_BLOCK_SIZE):
        block = slice(start, start + ECE_BLOCK_SIZE)
        in_bin = (assign_ece_bins(needs[block])[:, None] == np.arange(N_ECE_BINS)).astype(weights.dtype)
        errors = (needs[block] - needed[block])[:, None].astype(weights.dtype)
        gaps += weights[:, block] @ (in_bin * errors)  # (in_bin * errors) is questions x bins
    return safe_divide(np.abs(gaps).sum(axis=1, dtype=np.float64), weights.sum(axis=1, dtype=np.float64))


def assign_ece_bins(needs: FloatArray) -> NDArray[np.int64]:
    """Return for each need the index of its bin; the bins divide 0 to 1 into N_ECE_BINS equal parts."""
    return np.asarray(np.minimum((needs * N_ECE_BINS).astype(int), N_ECE_BINS - 1))  # 1.0 is in the last bin


@dataclass(frozen=True)
class NeedRanking:
    """Questions sorted by need for retrieval, for rank metrics such as AUROC.

    Methods take weights of the questions and return one value per resample.

    Attributes:
        needs: Need for retrieval of each question, from 0 to 1.
    """

    needs: FloatArray

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Indices that sort the questions by need, lowest first."""
        return np.argsort(self.needs, kind="stable")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first question of each group of equal needs, in sorted order."""
        return np.flatnonzero(np.diff(self.needs[self.order], prepend=np.nan) != 0)  # NaN differs from the first need

    def sort(self, weights: WeightMatrix) -> WeightMatrix:
        """Transpose the weights and sort them by need, for `auroc` and `areas`.

        Args:
            weights: How often each resample draws each question (resamples x questions).

        Returns:
            One row per question, from the lowest need up, and one column per resample. In this form, cumulative sums
            over the questions add whole rows, which is several times faster.
        """
        return weights.T[self.order]

    def auroc(self, sorted_weights: WeightMatrix, needed: BoolArray) -> FloatArray:
        """Return the area under the ROC curve of each resample.

        Pairs of questions with equal needs count half.

        Args:
            sorted_weights: Weights from `sort` (questions x resamples).
            needed: Whether each question really needed retrieval, in the original order.
        """
        positive, negative = self._group(sorted_weights, needed)
        return self._auroc(positive, negative, negative_up_to=np.cumsum(negative, axis=0))

    def areas(self, sorted_weights: WeightMatrix, needed: BoolArray) -> dict[str, FloatArray]:
        """Return the areas under the ROC curve, the precision-recall curve and the risk-coverage curve.

        Args:
            sorted_weights: Weights from `sort` (questions sorted by need, a score from 0 to 1, x resamples).
            needed: Whether each question needed retrieval, in the original order. These questions are the positives.

        Returns:
            One value per resample of 'auroc', 'auprc' (average precision as in scikit-learn) and 'aurc'.
        """
        positive, negative = self._group(sorted_weights, needed)
        both = positive + negative
        # Positives and all questions, from the lowest need up to and including each group.
        positive_up_to = np.cumsum(positive, axis=0)
        both_up_to = np.cumsum(both, axis=0)
        n_positive = positive_up_to[-1]
        n_both = both_up_to[-1]
        risk = positive_up_to / np.maximum(both_up_to, 1)
        # Risk counts from the lowest need up, but precision counts from the highest need down to and including each group.
        positive_down_to = n_positive - positive_up_to + positive
        both_down_to = n_both - both_up_to + both
        precision = positive_down_to / np.maximum(both_down_to, 1)
        return {
            "auroc": self._auroc(positive, negative, negative_up_to=both_up_to - positive_up_to),
            "auprc": safe_divide(_column_dot(positive, precision), n_positive.astype(np.float64)),
            "aurc": safe_divide(_column_dot(both, risk), n_both.astype(np.float64)),
        }

    def _auroc(self, positive: WeightMatrix, negative: WeightMatrix, negative_up_to: WeightMatrix) -> FloatArray:
        """Return the AUROC: the share of pairs with the positive ranked above the negative.

        Args:
            positive: Weight of the questions that needed retrieval, in each group of equal needs (groups x resamples).
            negative: Weight of the other questions in each group.
            negative_up_to: Weight of the negatives in each group and all groups of lower need.
        """
        pairs = _column_dot(positive, negative_up_to)
        if self.has_ties:
            pairs -= _column_dot(positive, negative) / 2  # pairs with equal needs were counted fully, but count half
        return safe_divide(pairs, _column_sum(positive) * _column_sum(negative))

    @property
    def has_ties(self) -> bool:
        """Whether several questions have the same need."""
        return len(self.starts) < len(self.needs)

    def _group(self, sorted_weights: WeightMatrix, needed: BoolArray) -> tuple[WeightMatrix, WeightMatrix]:
        """Sum the weights of each group of questions with equal needs.

        Returns:
            (positive, negative): the sums over the questions that needed retrieval, and over the other questions. Both
            have the shape groups x resamples.
        """
        positive = sorted_weights * needed[self.order, None].astype(sorted_weights.dtype)
        negative = sorted_weights - positive
        return self._sum_groups(positive), self._sum_groups(negative)

    def _sum_groups(self, rows: WeightMatrix) -> WeightMatrix:
        """Sum the rows (questions) of each group of equal needs."""
        if not self.has_ties:  # every group is one question
            return rows
        return np.asarray(np.add.reduceat(rows, self.starts, axis=0))


def safe_divide(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Divide elementwise. The result is NaN for denominators that are not positive."""
    undefined = np.full(np.shape(numerator), np.nan)
    return np.asarray(np.divide(numerator, denominator, out=undefined, where=denominator > 0))


def _column_dot(first: NDArray[Any], second: NDArray[Any]) -> FloatArray:
    """Return the dot product of each column of `first` with the same column of `second`."""
    return np.asarray(np.einsum("ij,ij->j", first, second, dtype=np.float64))


def _column_sum(weights: WeightMatrix) -> FloatArray:
    """Return the sum of each column."""
    return np.asarray(weights.sum(axis=0, dtype=np.float64))


# --- unweighted metrics ---------------------------------------------------------------------------


def auroc(needed: BoolArray, needs: FloatArray) -> float | None:
    """Return the area under the ROC curve of a gate's scores.

    Args:
        needed: Whether each question really needed retrieval.
        needs: The gate's score of each question, from 0 (the LLM knows) to 1 (retrieve).

    Returns:
        The area; None if all or none of the questions needed retrieval.
    """
    if not len(needs):
        return None
    ranking = NeedRanking(needs)
    sorted_weights = ranking.sort(unit_weights(len(needs)))
    return _first(ranking.auroc(sorted_weights, needed))


def accuracy(needed: BoolArray, needs: FloatArray) -> float | None:
    """Return the accuracy of predicting retrieval for scores above 0.5.

    Args:
        needed: Whether each question really needed retrieval.
        needs: The gate's score of each question, from 0 (the LLM knows) to 1 (retrieve).

    Returns:
        The share of correct predictions; None without questions.
    """
    return _first(weighted_accuracy(unit_weights(len(needs)), needed, needs))


def unit_weights(n: int) -> WeightMatrix:
    """Return one row of weights that counts every question once."""
    return np.ones((1, n))


def _first(values: FloatArray) -> float | None:
    """Return the first value; None if it is not finite."""
    return float(values[0]) if np.isfinite(values[0]) else None


@dataclass(frozen=True)
class Frontier:
    """Accuracy of the answers at every retrieval rate (share of questions with retrieval).

    Passages are retrieved for the questions with the highest needs first.

    Attributes:
        accuracies: Accuracy if passages are retrieved for k of n questions, for k = 0 to n. Ties are broken at random:
            each question in a group of equal needs counts with the mean gain of the group.
        area: Area under the curve, which is the mean accuracy over all retrieval rates.
        random_area: Area under the curve if the questions to retrieve for are chosen at random.
    """

    accuracies: FloatArray
    area: float
    random_area: float

    def at(self, rate: float) -> float:
        """Return the accuracy at a retrieval rate, interpolated linearly."""
        n = len(self.accuracies) - 1
        return float(np.interp(rate, np.arange(n + 1) / n, self.accuracies))


def compute_frontier(closed_book_right: BoolArray, open_book_right: BoolArray, needs: FloatArray) -> Frontier:
    """Compute the accuracy of a gate at every retrieval rate.

    Passages are retrieved for the questions with the highest needs first.

    Args:
        closed_book_right: Whether each answer without passages is correct.
        open_book_right: Whether each answer with passages is correct.
        needs: The gate's need for retrieval of each question. There must be at least one question.
    """
    n = len(needs)
    # 1 if retrieval helps, 0, or -1 if it harms.
    gains = open_book_right.astype(float) - closed_book_right.astype(float)
    ranking = NeedRanking(-needs)  # the highest need comes first
    # Within a group of equal needs, every order is equally likely. So each question gets the mean gain of its group.
    sizes = np.diff(np.append(ranking.starts, n))  # number of questions in each group
    group_means = np.add.reduceat(gains[ranking.order], ranking.starts) / sizes
    expected_gains = np.repeat(group_means, sizes)
    accuracies = (closed_book_right.sum() + np.concatenate([[0.0], np.cumsum(expected_gains)])) / n
    area = (accuracies[:-1] + accuracies[1:]).mean() / 2  # by the trapezoidal rule
    random_area = (accuracies[0] + accuracies[-1]) / 2
    return Frontier(accuracies, float(area), float(random_area))


def compute_oracle_frontier(closed_book_right: BoolArray, open_book_right: BoolArray) -> Frontier:
    """Compute the best possible accuracy at every retrieval rate.

    The oracle retrieves first for questions that retrieval helps.

    Args:
        closed_book_right: Whether each answer without passages is correct.
        open_book_right: Whether each answer with passages is correct.
    """
    # 1 if retrieval helps, 0, or -1 if it harms.
    gains = open_book_right.astype(float) - closed_book_right.astype(float)
    return compute_frontier(closed_book_right, open_book_right, needs=(gains + 1) / 2)
