"""The messages of the demo, each answered in three ways: without searching, after a search, and as the gate decides.

Knows pipelines, gold answers and counts; prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from knowgate.datasets import load_questions
from knowgate.evaluation import estimate_tokens
from knowgate.gates import load_gate
from knowgate.pipeline import AdaptiveRAG, Conversation
from knowgate.text import grade_contains
from knowgate.types import Answer, Passage, Question, Retriever

NEVER, ALWAYS, GATED = WAYS = ("never", "always", "gated")
STREAM, PAIR = "messages.jsonl", "two_ways.jsonl"


def demo_folder() -> Path:
    return Path(str(resources.files("knowgate"))) / "demo_data"


def demo_messages(limit: int | None = None, name: str = STREAM) -> list[Question]:
    """What people write, in its order: a follow-up stands after what it follows."""
    return load_questions(f"jsonl:{demo_folder() / name}", limit)


@dataclass(frozen=True)
class Distant:
    """A search as far away as real ones are: the retriever, and a wait before it."""

    inner: Retriever
    seconds: float

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        time.sleep(self.seconds)
        return self.inner.search(queries, k)


def three_ways(gated: AdaptiveRAG) -> dict[str, AdaptiveRAG]:
    """Pipelines that differ in nothing but who decides."""
    plain = {way: replace(gated, gate=load_gate(way), threshold=None) for way in (NEVER, ALWAYS)}
    return {**plain, GATED: gated}


@dataclass(frozen=True)
class Outcome:
    """One answer. extra: seconds in which a follow-up was made to stand alone."""

    answer: Answer
    extra: float = 0.0

    @property
    def is_right(self) -> bool | None:
        """None where there is nothing to get right, as with a greeting."""
        question = self.answer.question
        return grade_contains(self.answer.text, question).correct if question.answers else None

    @property
    def searched(self) -> bool:
        return self.answer.decision.retrieve

    @property
    def seconds(self) -> float:
        return self.answer.seconds["total"] + self.extra

    @property
    def tokens(self) -> int:
        """Written, a draft that was not used among them, and read in passages (estimated from their length)."""
        draft = self.answer.draft.n_tokens if self.answer.draft and self.answer.passages else 0
        read = sum(estimate_tokens(f"{one.title} {one.text}") for one in self.answer.passages)
        return draft + self.answer.n_tokens + round(read)


@dataclass(frozen=True)
class Total:
    """All answers of one way."""

    outcomes: Sequence[Outcome]

    @property
    def right(self) -> int:
        return sum(bool(one.is_right) for one in self.outcomes)

    @property
    def graded(self) -> int:
        return sum(one.is_right is not None for one in self.outcomes)

    @property
    def searches(self) -> int:
        return sum(one.searched for one in self.outcomes)

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.outcomes)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.outcomes)


Outcomes = dict[str, Outcome]  # by way


@dataclass(frozen=True)
class Talk:
    """A conversation that is answered in all ways; what was said before is what the gated way answered."""

    ways: dict[str, AdaptiveRAG]
    conversation: Conversation

    def answer(self, message: Question, hear: Callable[[Outcome], None] = lambda outcome: None) -> Outcomes:
        """hear: told of each answer as it comes, in the order of the ways."""
        start = time.perf_counter()
        understood = self.conversation.understand(message.text)
        question = replace(message, text=understood.text, meta={**message.meta, **understood.meta})
        extra = time.perf_counter() - start
        found: Outcomes = {}
        for way, rag in self.ways.items():
            found[way] = Outcome(rag.answer(question), extra)
            hear(found[way])
        self.conversation.remember(found[GATED].answer)
        return found


def totals(answered: Sequence[Outcomes]) -> dict[str, Total]:
    return {way: Total([one[way] for one in answered]) for way in WAYS}
