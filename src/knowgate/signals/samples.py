"""The numbers of a label, exactly as the paper defines them (Zhang et al., KBM, section 3.2). Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from knowgate.text import chosen_letter, normalise
from knowgate.types import Question


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


def effect(closed: float | None, opened: float | None) -> Effect | None:
    """Beneficial if the indicator rises open-book, harmful if it falls, neutral if it stays."""
    if closed is None or opened is None:
        return None
    if math.isclose(closed, opened, abs_tol=1e-9):  # sums of logarithms differ in the last bit
        return Effect.NEUTRAL
    return Effect.BENEFICIAL if opened > closed else Effect.HARMFUL


def benefit(closed: bool | None, opened: bool | None) -> int | None:
    """Open-book right minus closed-book right, of the greedy answers: +1 helps, 0 neutral, -1 hurts."""
    if closed is None or opened is None:
        return None
    return int(opened) - int(closed)


def canonical(answer: str, question: Question) -> str:
    """What counts as the same answer: the letter of a choice, else the normalised text."""
    return (chosen_letter(answer, question.choices) if question.choices else None) or normalise(answer)
