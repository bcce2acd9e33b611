"""Ask the LLM whether it can answer, and read the probabilities of the two label words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.gates.parts.words import split_words
from knowgate.prompts import self_assessment
from knowgate.statistics import sigmoid
from knowgate.types import LabelPrompt, Question, Reading, Signal, Want


@dataclass(frozen=True)
class PromptGate:
    """need = P(unknown label) / (P(known label) + P(unknown label)) after the self-assessment prompt.

    Needs: labels. Cost per question: one prefill of about 120 tokens.
    Reference: Kadavath et al. 2022; wording of Lv et al. (DH-ICL), section 2.1.
    Example:
        >>> PromptGate("yes/no").labels
        ('yes', 'no')
    """

    words: str = "true/false"
    name = "prompt"
    needs = frozenset({Signal.LABELS})
    want = Want()
    threshold = 0.5

    def __post_init__(self) -> None:
        split_words(self.words, self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        return split_words(self.words, self.name)

    def ask(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        known, unknown = self.labels
        return [self_assessment(question, known, unknown) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [_need(*map(float, reading.labels[self.name][-1])) for reading in readings]


def _need(known: float, unknown: float) -> float:
    """NaN stays NaN, which `gates.score` refuses."""
    return sigmoid(unknown - known)
