"""The messages of the demo, each answered in three ways: without searching, after a search, and as the gate decides.

What the gate decides is one of the other two ways: what it made on its way is counted there and not made again. Knows
pipelines, gold answers and counts; prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from knowgate.core.text import estimate_tokens, grade_contains
from knowgate.data.questions import load_questions
from knowgate.gates import load_gate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.conversation import Conversation
from knowgate.pipeline.question_state import is_complete_draft
from knowgate.types import Answer, Passage, Question, Retriever

NEVER, ALWAYS, GATED = MODES = ("never", "always", "gated")
MESSAGES_FILE, PAIR_FILE = "messages.jsonl", "two_ways.jsonl"


def demo_folder() -> Path:
    return Path(str(resources.files("knowgate.cli.demo"))) / "data"


def demo_messages(limit: int | None = None, name: str = MESSAGES_FILE) -> list[Question]:
    """What people write, in its order: a follow-up stands after what it follows."""
    return load_questions(f"jsonl:{demo_folder() / name}", limit)


@dataclass(frozen=True)
class DelayedRetriever:
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


def build_mode_pipelines(gated: AdaptiveRAG) -> dict[str, AdaptiveRAG]:
    """Pipelines that differ in nothing but who decides."""
    plain = {way: replace(gated, gate=load_gate(way), threshold=None) for way in (NEVER, ALWAYS)}
    return {**plain, GATED: gated}


@dataclass(frozen=True)
class DemoOutcome:
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
class OutcomeTotals:
    """All answers of one way."""

    outcomes: Sequence[DemoOutcome]

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


OutcomesByMode = dict[str, DemoOutcome]  # by way


@dataclass(frozen=True)
class DemoConversation:
    """A conversation that is answered in all ways; what was said before is what the gated way answered."""

    ways: dict[str, AdaptiveRAG]
    conversation: Conversation

    def answer(self, message: Question, hear: Callable[[DemoOutcome], None] = lambda outcome: None) -> OutcomesByMode:
        """hear: told of each answer as it comes, in the order of the ways."""
        start = time.perf_counter()
        understood = self.conversation.rewrite(message.text)
        question = replace(message, text=understood.text, meta={**message.meta, **understood.meta})
        extra = time.perf_counter() - start
        rag = self.ways[GATED]
        gated = rag.answer(question)
        shared = {
            NEVER: extract_closed_book_answer(gated, rag.max_tokens),
            ALWAYS: extract_open_book_answer(gated),
            GATED: gated,
        }
        found: OutcomesByMode = {}
        for way in MODES:
            found[way] = DemoOutcome(shared[way] or self.ways[way].answer(question), extra)
            hear(found[way])
        self.conversation.remember(gated)
        return found


def extract_closed_book_answer(gated: Answer, max_tokens: int) -> Answer | None:
    """The answer without a search, where the gate's own way has made it; None where it broke off after some tokens."""
    if not gated.decision.retrieve:
        return _only(gated, "read", "answer")
    if gated.draft is None or not is_complete_draft(gated.draft, max_tokens):
        return None
    unsearched = replace(gated.decision, retrieve=False)
    told = replace(gated, text=gated.draft.text, n_tokens=gated.draft.n_tokens, passages=(), decision=unsearched)
    return _only(told, "read")


def extract_open_book_answer(gated: Answer) -> Answer | None:
    """The answer after a search, where the gate's own way has made it. An arbiter may have given the other one."""
    if not gated.passages:
        return None
    told = replace(gated, text=gated.choice.open) if gated.choice else gated
    return _only(told, "retrieve", "fit", "answer")


def _only(answer: Answer, *stages: str) -> Answer:
    """With these stages' seconds alone, and no draft beside it."""
    seconds = {stage: took for stage, took in answer.seconds.items() if stage in stages}
    return replace(answer, seconds={**seconds, "total": sum(seconds.values())}, draft=None)


def sum_outcomes(answered: Sequence[OutcomesByMode]) -> dict[str, OutcomeTotals]:
    return {way: OutcomeTotals([one[way] for one in answered]) for way in MODES}
