"""What an arbiter is: shown the answer from memory and the answer with passages, it says how much it believes each.

Knows answers and what they were made from; not who made them, nor how a choice is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from knowgate.types.records import Completion, Passage, Question, Signal
from knowgate.types.roles import ModelIdentity


@dataclass(frozen=True)
class BothAnswers:
    """A question answered twice. closed: from memory, whole; open: with `passages` shown.

    The completions' tokens are None where the LLM gives no log-probabilities.
    """

    question: Question
    closed: Completion
    open: Completion
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Belief:
    """How probably each answer is right, from 0 to 1; where both are equal, the answer with passages is given.

    why: what the arbiter went by, in words; '' where it has none.
    """

    closed: float
    open: float
    why: str = ""

    @property
    def prefers_closed(self) -> bool:
        return self.closed > self.open


class Arbiter(Protocol):
    """Chooses after retrieval. Only asked where the two answers differ: what they agree on costs nothing.

    A class that inherits from this one has only to give `name`, `fingerprint` and `believe`.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Names what it does, wherever it lies: a proof about a cascade holds for one arbiter."""
        ...

    def believe(self, answers: Sequence[BothAnswers]) -> list[Belief]: ...

    @property
    def needs(self) -> frozenset[Signal]:
        """What of the LLM it reads beside the two texts: `Signal.LOGPROBS`, or nothing."""
        return frozenset()

    @property
    def wants_passages(self) -> bool:
        """Whether it reads the passages, so that records without them are of no use to it."""
        return False

    @property
    def drafts(self) -> bool:
        """Whether the answer from memory is made for it where the gate reads no whole one."""
        return True

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """The arbiter ready for this model and this fingerprint of the prompts; raises if it was made for others."""
        return self

    def lets_out(self, beginning: str) -> bool:
        """Whether an answer with passages that begins so will be given whatever follows: then it can be streamed."""
        return False
