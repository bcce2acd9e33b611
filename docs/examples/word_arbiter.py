"""An arbiter of your own: an answer of few words is believed more than one that talks around it."""

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import AnswerPair, Arbiter, Belief


@dataclass(frozen=True)
class WordArbiter(Arbiter):
    """Believes the shorter answer.

    Example:
        >>> from knowgate import Completion, Question
        >>> both = BothAnswers(Question("Who?"), Completion("Goethe"), Completion("It may have been him."))
        >>> WordArbiter().estimate([both])[0].prefers_closed
        True
    """

    name = "word"
    fingerprint = "word-1"  # another one for whatever chooses otherwise

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        return [Belief(1 / (1 + words(both.closed.text)), 1 / (1 + words(both.open.text))) for both in answers]


def words(text: str) -> int:
    return len(text.split())
