"""A gate in one file: an LLM that needs many words often guesses."""

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import Gate, Question, Reading, Signal


@dataclass(frozen=True)
class LongAnswerGate(Gate):
    """need = 1 for drafts longer than `words` words.

    Needs: draft. Cost per question: none when skipping.
    Example:
        >>> from knowgate.types import Completion
        >>> LongAnswerGate(words=2).score([Question("?")], [Reading(Completion("a b c"))])
        [1.0]
    """

    words: int = 5
    name = "long-answer"
    needs = frozenset({Signal.DRAFT})

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        drafts = [reading.draft.text if reading.draft else "" for reading in readings]
        return [float(len(draft.split()) > self.words) for draft in drafts]
