"""Always retrieve: plain RAG, the row every table starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import Gate, Question, Reading


@dataclass(frozen=True)
class AlwaysGate(Gate):
    """need = 1.

    Needs: nothing. Cost per question: none for the decision, a retrieval each.
    Example:
        >>> AlwaysGate().score([Question("Hi")], [Reading()])
        [1.0]
    """

    may_be_overruled = False
    is_quick = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]
