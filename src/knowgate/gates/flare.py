"""FLARE for short answers: draft, and retrieve when a token of the draft is improbable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.errors import BadSetting
from knowgate.signals import check_draft_tokens, draft_need, least_probability
from knowgate.types import Gate, Question, Reading, Signal, Want


@dataclass(frozen=True)
class FlareGate(Gate):
    """need = 1 - probability of the draft's least probable token; retrieves when that is below `theta`.

    Needs: logprobs. Cost per question: nothing when skipping; the drafted tokens when retrieving.
    Reference: Jiang et al. 2023, section 3.2 (one look-ahead sentence: short answers are one sentence).
    Example:
        >>> FlareGate(theta=0.4).threshold
        0.6
    """

    theta: float = 0.4
    draft_tokens: int = 32
    needs = frozenset({Signal.LOGPROBS})
    is_quick = True

    def __post_init__(self) -> None:
        if not 0 <= self.theta <= 1:
            raise BadSetting(f"flare: theta is {self.theta}; it must be between 0 and 1.")
        check_draft_tokens(self.name, self.draft_tokens)

    @property
    def want(self) -> Want:
        return Want(draft_tokens=self.draft_tokens)

    @property
    def threshold(self) -> float:
        return 1 - self.theta

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [draft_need(reading.draft, least_probability, self.draft_tokens) for reading in readings]
