"""Signals of sampled answers: mastery, certainty and effect of retrieval (KBM, section 3.2), dispersion (SeaKR)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from knowgate.core.text import normalize, parse_choice_letter
from knowgate.errors import ModelError
from knowgate.types import Question, Vector

# Names of the recorded signals of SeaKR.
SEAKR_END = "seakr_end"  # log-determinant of the states at the end token of each sample
SEAKR_SIZE = "seakr_size"  # log mean square of these states
SEAKR = "seakr"  # in older runs: log-determinant of the states at the last token of the text
SEAKR_SAMPLES = 20  # released settings of SeaKR, as is alpha
SEAKR_ALPHA = 1e-3  # also of INSIDE (Chen et al. 2024), whose score SeaKR uses
MIN_MEAN_SQUARE = 1e-9


class Effect(StrEnum):
    """Whether retrieval raised, kept or lowered a measure of sampled answers.

    The measure is mastery (share of right answers) or certainty (agreement).
    """

    BENEFICIAL = "beneficial"
    NEUTRAL = "neutral"
    HARMFUL = "harmful"


def mastery(correct: Sequence[bool | None]) -> float | None:
    """Return the share of correct answers among the graded ones. None if none was graded."""
    graded = [verdict for verdict in correct if verdict is not None]
    return sum(graded) / len(graded) if graded else None


def certainty(answers: Sequence[str]) -> float | None:
    """Return how much sampled answers agree, from 0 to 1, or None for fewer than two answers.

    This is 1 minus the entropy of the distinct answers. The logarithms have the base n, so the entropy of n different
    answers is 1.
    """
    n = len(answers)
    if n < 2:
        return None
    shares = [count / n for count in Counter(answers).values()]
    entropy = -sum(share * math.log(share, n) for share in shares)
    return min(1.0, max(0.0, 1 - entropy))


def retrieval_effect(closed_book: float | None, open_book: float | None) -> Effect | None:
    """Return whether retrieval raised, kept or lowered a measure, such as the share of right answers.

    Args:
        closed_book: The measure for answers without passages; None if unknown.
        open_book: The measure for answers with passages; None if unknown.

    Returns:
        The effect of retrieval; None if one of the measures is unknown.
    """
    if closed_book is None or open_book is None:
        return None
    if math.isclose(closed_book, open_book, abs_tol=1e-9):  # sums of logarithms differ in the last bit
        return Effect.NEUTRAL
    return Effect.BENEFICIAL if open_book > closed_book else Effect.HARMFUL


def retrieval_benefit(closed_book_right: bool | None, open_book_right: bool | None) -> int | None:
    """Compare the grades of an answer without passages (closed-book) and with passages (open-book).

    Returns:
        1 if only the answer with passages is right, -1 if only the one without is right, and 0 if both are right or
        both are wrong. None if one of the two answers was not graded.
    """
    if closed_book_right is None or open_book_right is None:
        return None
    return int(open_book_right) - int(closed_book_right)


def canonical_answer(answer: str, question: Question) -> str:
    """Return a comparable form of an answer: the letter of a choice, or the normalized text."""
    letter = parse_choice_letter(answer, question.choices) if question.choices else None
    return letter or normalize(answer)


# --- dispersion (SeaKR) ---------------------------------------------------------------------------


def log_determinant(states: Vector, alpha: float = SEAKR_ALPHA) -> float:
    """Compute how much n hidden states differ.

    Formula: (1 / n) log det(Z J Z^T + alpha I). Z holds the states. J centers them.
    """
    # log det is the sum of the logs of the eigenvalues. Rounding can make an eigenvalue slightly negative.
    eigenvalues = np.linalg.eigvalsh(_compute_gram(states))
    return float(np.log(np.maximum(eigenvalues, 0.0) + alpha).mean())


def log_mean_square(states: Vector) -> float:
    """Compute the logarithm of the mean squared length of hidden states, each centered by its own mean."""
    return float(np.log(max(float(np.diag(_compute_gram(states)).mean()), MIN_MEAN_SQUARE)))


def relative_dispersion(log_det: float, log_square: float, n: int, alpha: float = SEAKR_ALPHA) -> float:
    """Scale the log-determinant of hidden states, from 0 (all equal) to 1 (orthogonal).

    Without scaling, long vectors would have a higher log-determinant than short ones.

    Args:
        log_det: Result of `log_determinant`.
        log_square: Result of `log_mean_square`.
        n: Number of states.
        alpha: Regularization of the log-determinant.

    Returns:
        A number from 0 to 1.
    """
    log_alpha = math.log(alpha)  # `log_determinant` adds alpha to each eigenvalue
    # If all states are equal, one eigenvalue is n times the mean square, and the other n - 1 are zero.
    smallest = (np.logaddexp(math.log(n) + log_square, log_alpha) + (n - 1) * log_alpha) / n
    # If all states are orthogonal, each of the n eigenvalues is the mean square.
    largest = np.logaddexp(log_square, log_alpha)
    if largest <= smallest:
        return 0.0
    return float(np.clip((log_det - smallest) / (largest - smallest), 0.0, 1.0))


def _compute_gram(states: Vector) -> NDArray[np.float64]:
    """Compute the inner products of the states, each centered by its own mean."""
    if states.ndim != 2 or not len(states) or not np.isfinite(states).all():
        raise ModelError(
            "the hidden states of the sampled answers must be a matrix (samples x width) of finite numbers. Their shape is "
            f"{states.shape}. Check the model or server."
        )
    centered = states.astype(np.float64) - states.astype(np.float64).mean(axis=1, keepdims=True)
    products: NDArray[np.float64] = centered @ centered.T
    return products
