"""Ask the LLM whether it can answer, and read the probabilities of the two label words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.gates.parts.words import split_words
from knowgate.prompts import self_assessment
from knowgate.signals import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
from knowgate.statistics import sigmoid
from knowgate.types import Gate, LabelPrompt, Question, Reading, Signal


@dataclass(frozen=True)
class PromptGate(Gate):
    """need = P(unknown label) / (P(known label) + P(unknown label)) after the self-assessment prompt.

    Needs: labels. Cost per question: one prefill of about 120 tokens.
    Reference: Kadavath et al. 2022; wording of Lv et al. (DH-ICL), section 2.1.
    Example:
        >>> PromptGate("yes/no").labels
        ('yes', 'no')
    """

    words: str = "true/false"
    needs = frozenset({Signal.LABELS})

    def __post_init__(self) -> None:
        split_words(self.words, self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        return split_words(self.words, self.name)

    @property
    def answered_by(self) -> str:
        """On record are the usual words only; others may be answered otherwise."""
        return SELF_ASSESSMENT if self.labels == ASSESSMENT_LABELS else ""

    def ask(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        known, unknown = self.labels
        return [self_assessment(question, known, unknown) for question in questions]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [_need(self._logit(reading)) for reading in readings]

    def _logit(self, reading: Reading) -> float:
        if self.name in reading.labels:
            return self_assessment_logit(reading.labels[self.name])
        return reading.signals[self.answered_by]


def _need(logit: float) -> float:
    """NaN stays NaN, which `score_questions` refuses."""
    return sigmoid(-logit)
