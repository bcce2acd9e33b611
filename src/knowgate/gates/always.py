"""Always retrieve: plain RAG, the row every table starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.types import Gate, Question, Reading


@dataclass(frozen=True)
class AlwaysGate(Gate):
    """need = 1.

    unless: 'rules' leaves out what rules skip, small talk and the like; 'nothing' looks up even that.

    Needs: nothing. Cost per question: none for the decision, a retrieval each.
    Example:
        >>> AlwaysGate().score([Question("Hi")], [Reading()])
        [1.0]
    """

    unless: Literal["nothing", "rules"] = "nothing"
    is_quick = True

    @property
    def may_be_overruled(self) -> bool:
        return self.unless == "rules"

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]
