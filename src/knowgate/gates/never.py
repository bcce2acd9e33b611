"""Never retrieve: the LLM alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import Gate, Question, Reading


@dataclass(frozen=True)
class NeverGate(Gate):
    """need = 0.

    Needs: nothing. Cost per question: none.
    Example:
        >>> NeverGate().score([Question("Hi")], [Reading()])
        [0.0]
    """

    may_be_overruled = False
    is_quick = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [0.0 for _ in questions]
