"""An arbiter of your own: prefer the answer with fewer words."""

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import AnswerPair, Arbiter, Belief


@dataclass(frozen=True)
class WordArbiter(Arbiter):
    """Believe the shorter answer more.

    Example:
        >>> from knowgate import Completion, Question
        >>> both = AnswerPair(Question("Who?"), Completion("Goethe"), Completion("It may have been him."))
        >>> WordArbiter().estimate([both])[0].prefers_closed
        True
    """

    name = "word"
    fingerprint = "word-1"  # change it whenever the choice changes

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        return [Belief(1 / (1 + words(both.closed.text)), 1 / (1 + words(both.open.text))) for both in answers]


def words(text: str) -> int:
    return len(text.split())
