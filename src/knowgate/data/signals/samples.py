"""SeaKR's uncertainty: how far apart the states are in which a model's sampled answers end.

Knows states as numbers; not where they come from or what is decided on them.
"""

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

SEAKR_END = "seakr_end"  # its name on record, read where an answer ends: at the token that ends it
SEAKR_SIZE = "seakr_size"  # how long those states are, as `log_size` has it
SEAKR = "seakr"  # what older runs have instead: read at the last token of the answer's text, without the size
SEAKR_SAMPLES = 20  # SeaKR's released settings, as is alpha
SEAKR_ALPHA = 1e-3  # also that of INSIDE (Chen et al. 2024), whose score SeaKR takes over


def log_determinant(states: Vector, alpha: float = SEAKR_ALPHA) -> float:
    """(1 / n) log det(Z J Z^T + alpha I) of n states Z (n x d), where J takes each state's own mean off it.

    Never below log(alpha). Equal answers give one eigenvalue of some size and n - 1 of alpha.
    """
    eigenvalues = np.linalg.eigvalsh(_gram(states))
    return float(np.log(np.maximum(eigenvalues, 0.0) + alpha).mean())


def log_mean_square(states: Vector) -> float:
    """The logarithm of the mean squared length of the states, each without its own mean; states of zeros count 1e-9."""
    return float(np.log(max(float(np.diag(_gram(states)).mean()), 1e-9)))


def relative_dispersion(uncertainty: float, size: float, n: int, alpha: float = SEAKR_ALPHA) -> float:
    """The log-determinant of n states on a scale from 0 to 1 that does not depend on how long the LLM's states are.

    0: all n the same, one eigenvalue of n times their squared length. 1: all of them at right angles.
    """
    least = (np.logaddexp(math.log(n) + size, math.log(alpha)) + (n - 1) * math.log(alpha)) / n
    most = np.logaddexp(size, math.log(alpha))
    return float(np.clip((uncertainty - least) / (most - least), 0.0, 1.0)) if most > least else 0.0


def _gram(states: Vector) -> NDArray[np.float64]:
    """Products of the states, each with its own mean taken off."""
    if states.ndim != 2 or not len(states) or not np.isfinite(states).all():
        raise ModelError(f"the states of the samples are no array of numbers (samples x width): {states.shape}.")
    centred = states.astype(np.float64) - states.astype(np.float64).mean(axis=1, keepdims=True)
    products: NDArray[np.float64] = centred @ centred.T
    return products


class Effect(StrEnum):
    """What retrieval did to an indicator."""

    BENEFICIAL = "beneficial"
    NEUTRAL = "neutral"
    HARMFUL = "harmful"


def mastery(correct: Sequence[bool | None]) -> float | None:
    """Share of the graded samples that are correct; None when nothing could be graded."""
    graded = [verdict for verdict in correct if verdict is not None]
    return sum(graded) / len(graded) if graded else None


def certainty(answers: Sequence[str]) -> float | None:
    """1 - entropy of the distinct (normalised) answers, logarithms to base I, the number of samples.

    The paper wants entropy in [0, 1]; base I gives it: I equal answers have certainty 1, I different ones 0.
    None for fewer than two samples.
    """
    n = len(answers)
    if n < 2:
        return None
    shares = [count / n for count in Counter(answers).values()]
    entropy = -sum(share * math.log(share, n) for share in shares)
    return min(1.0, max(0.0, 1 - entropy))


def retrieval_effect(closed: float | None, opened: float | None) -> Effect | None:
    """Beneficial if the indicator rises open-book, harmful if it falls, neutral if it stays."""
    if closed is None or opened is None:
        return None
    if math.isclose(closed, opened, abs_tol=1e-9):  # sums of logarithms differ in the last bit
        return Effect.NEUTRAL
    return Effect.BENEFICIAL if opened > closed else Effect.HARMFUL


def retrieval_benefit(closed: bool | None, opened: bool | None) -> int | None:
    """Open-book right minus closed-book right, of the greedy answers: +1 helps, 0 neutral, -1 hurts."""
    if closed is None or opened is None:
        return None
    return int(opened) - int(closed)


def canonical_answer(answer: str, question: Question) -> str:
    """What counts as the same answer: the letter of a choice, else the normalised text."""
    return (parse_choice_letter(answer, question.choices) if question.choices else None) or normalize(answer)
