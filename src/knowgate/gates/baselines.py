"""Baselines that every gate is compared with: always, never and at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting
from knowgate.types import Gate, Question, Reading


@dataclass(frozen=True)
class AlwaysGate(Gate):
    """Retrieves for every question, as plain RAG does: need = 1.

    `unless='rules'` lets rules skip questions such as small talk; 'nothing' retrieves even for those.

    Needs: nothing. Cost per question: none for the decision; one retrieval.

    Example:
        >>> AlwaysGate().score([Question("Hi")], [Reading()])
        [1.0]
    """

    unless: Literal["nothing", "rules"] = "nothing"
    is_pure = True

    @property
    def obeys_rules(self) -> bool:
        """Whether rules may skip questions."""
        return self.unless == "rules"

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return need 1 for every question."""
        return [1.0 for _ in questions]


@dataclass(frozen=True)
class NeverGate(Gate):
    """Never retrieves: need = 0.

    Needs: nothing. Cost per question: none.

    Example:
        >>> NeverGate().score([Question("Hi")], [Reading()])
        [0.0]
    """

    obeys_rules = False
    is_pure = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return need 0 for every question."""
        return [0.0 for _ in questions]


@dataclass(frozen=True)
class RandomGate(Gate):
    """Retrieves for a random share of the questions, which is given by `rate`.

    The need is uniform in (0, 1) and depends only on the question and `seed`. A useful gate must beat this one at the
    same retrieval rate.

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
        """The threshold above which a share of `rate` lies."""
        return 1 - self.rate

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return a uniform need for every question."""
        return [self._draw_uniform(question) for question in questions]

    def _draw_uniform(self, question: Question) -> float:
        """Hash a question to a number in the open interval (0, 1), so that rates of 0 and 1 are exact."""
        bits = int(sha256_text(str(self.seed), question.id, question.text)[:13], 16)
        return (bits + 0.5) / 16**13
