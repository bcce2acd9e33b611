"""Always retrieve: plain RAG, the row every table starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting
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
    is_pure = True

    @property
    def obeys_rules(self) -> bool:
        return self.unless == "rules"

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]


@dataclass(frozen=True)
class NeverGate(Gate):
    """need = 0.

    Needs: nothing. Cost per question: none.
    Example:
        >>> NeverGate().score([Question("Hi")], [Reading()])
        [0.0]
    """

    obeys_rules = False
    is_pure = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [0.0 for _ in questions]


@dataclass(frozen=True)
class RandomGate(Gate):
    """need is uniform in [0, 1], fixed by question and seed; the default threshold retrieves the share `rate`.

    Needs: nothing. Cost per question: none.
    Example:
        >>> RandomGate(rate=0.3).threshold
        0.7
    """

    rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise BadSetting(f"random: rate is {self.rate}; it must be between 0 and 1.")

    @property
    def threshold(self) -> float:
        return 1 - self.rate

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [self._uniform(question) for question in questions]

    def _uniform(self, question: Question) -> float:
        """In (0, 1): with rate 1 every question is above the threshold 0, with rate 0 none above 1."""
        bits = int(sha256_text(str(self.seed), question.id, question.text)[:13], 16)
        return (bits + 0.5) / 16**13
