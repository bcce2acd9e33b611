"""Retrieve at random: what any gate with the same retrieval rate must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.errors import BadSetting
from knowgate.files import sha256_text
from knowgate.types import Gate, Question, Reading


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
