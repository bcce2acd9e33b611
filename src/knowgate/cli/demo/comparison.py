"""The messages of the demo, each answered in three modes: never searching, always searching, and as the gate decides.

The gated answer is the same as the answer of one of the other modes, so it is counted there, too, and not generated
again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    """Return the folder with the data of the demo."""
    return Path(str(resources.files("knowgate.cli.demo"))) / "data"


def load_demo_messages(limit: int | None = None, name: str = MESSAGES_FILE) -> list[Question]:
    """Load the messages of the demo in order. A follow-up comes after the message that it refers to.

    Args:
        limit: Load only the first messages, at most this many.
        name: File in the data folder of the demo.
    """
    return load_questions(f"jsonl:{demo_folder() / name}", limit)


@dataclass(frozen=True)
class DelayedRetriever:
    """Retriever that waits some seconds before each search, to imitate a hosted search service."""

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
    """Build one pipeline for each mode, keyed by mode. They differ only in the gate."""
    others = {mode: gated.replace(gate=load_gate(mode), threshold=None) for mode in (NEVER, ALWAYS)}
    return {**others, GATED: gated}


@dataclass(frozen=True)
class DemoOutcome:
    """Answer to a message in one mode.

    Attributes:
        answer: The answer.
        rewrite_seconds: Time to rewrite a follow-up as a standalone question.
    """

    answer: Answer
    rewrite_seconds: float = 0.0

    @property
    def is_right(self) -> bool | None:
        """Whether the answer is right; None for messages without a gold answer, such as greetings."""
        question = self.answer.question
        return grade_contains(self.answer.text, question).correct if question.answers else None

    @property
    def has_searched(self) -> bool:
        """Whether this mode searched for the message."""
        return self.answer.decision.retrieve

    @property
    def seconds(self) -> float:
        """Time to answer the message, including the rewriting of a follow-up."""
        return self.answer.seconds["total"] + self.rewrite_seconds

    @property
    def tokens(self) -> int:
        """Number of generated tokens, including an unused draft, plus an estimate of the tokens of the passages."""
        draft = self.answer.draft.n_tokens if self.answer.draft and self.answer.passages else 0
        passages = sum(estimate_tokens(f"{passage.title} {passage.text}") for passage in self.answer.passages)
        return draft + self.answer.n_tokens + round(passages)


@dataclass(frozen=True)
class OutcomeTotals:
    """Sums over all answers of one mode.

    Attributes:
        right: Number of right answers.
        graded: Number of answers that could be graded.
        searches: Number of searches.
        tokens: Generated tokens plus tokens of passages.
        seconds: Total time.
    """

    right: int
    graded: int
    searches: int
    tokens: int
    seconds: float


OutcomesByMode = dict[str, DemoOutcome]


def sum_outcomes(outcomes: Sequence[DemoOutcome]) -> OutcomeTotals:
    """Sum the outcomes of one mode."""
    return OutcomeTotals(
        right=sum(bool(outcome.is_right) for outcome in outcomes),
        graded=sum(outcome.is_right is not None for outcome in outcomes),
        searches=sum(outcome.has_searched for outcome in outcomes),
        tokens=sum(outcome.tokens for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
    )


@dataclass(frozen=True)
class DemoConversation:
    """Conversation in which every message is answered in all modes. Only gated answers enter its history."""

    pipelines: dict[str, AdaptiveRAG]
    conversation: Conversation

    def answer(self, message: Question) -> OutcomesByMode:
        """Answer a message in all modes.

        The gated pipeline answers first. The closed-book or open-book answer that it generated is also the answer of the
        mode `never` or `always`. If it did not generate one of them, the pipeline of that mode answers the message.
        """
        start = time.perf_counter()
        rewritten = self.conversation.rewrite(message.text)
        question = replace(message, text=rewritten.text, meta={**message.meta, **rewritten.meta})
        rewrite_seconds = time.perf_counter() - start
        rag = self.pipelines[GATED]
        gated = rag.answer(question)
        answers_from_gated = {  # None for a mode whose answer the gated pipeline did not generate
            NEVER: extract_closed_book_answer(gated, rag.max_tokens),
            ALWAYS: extract_open_book_answer(gated),
            GATED: gated,
        }
        outcomes: OutcomesByMode = {}
        for mode in MODES:
            answer = answers_from_gated[mode] or self.pipelines[mode].answer(question)
            outcomes[mode] = DemoOutcome(answer, rewrite_seconds)
        self.conversation.remember(gated)
        return outcomes


def extract_closed_book_answer(gated: Answer, max_tokens: int) -> Answer | None:
    """Return the closed-book answer (without passages) that the gated mode generated; None if it generated none.

    If the gate did not retrieve, that is its answer. If it did, that is the draft that it read before it decided, unless
    the draft was cut off.

    Args:
        gated: The answer of the gated mode.
        max_tokens: Maximum length of an answer, to tell whether the draft is complete.
    """
    if not gated.decision.retrieve:
        return _keep_stages(gated, "read", "answer")
    if gated.draft is None or not is_complete_draft(gated.draft, max_tokens):
        return None
    decision = replace(gated.decision, retrieve=False)
    closed = replace(gated, text=gated.draft.text, n_tokens=gated.draft.n_tokens, passages=(), decision=decision)
    return _keep_stages(closed, "read")


def extract_open_book_answer(gated: Answer) -> Answer | None:
    """Return the open-book answer (with passages) that the gated mode generated; None if it gave the LLM no passages.

    If an arbiter chose between the open-book and the closed-book answer, `gated.choice` holds both, and the open-book
    one is returned even if the arbiter rejected it.
    """
    if not gated.passages:
        return None
    answer = replace(gated, text=gated.choice.open) if gated.choice else gated
    return _keep_stages(answer, "retrieve", "fit", "answer")


def _keep_stages(answer: Answer, *stages: str) -> Answer:
    """Return a copy of an answer without its draft, as if the pipeline had run only these stages.

    The seconds of other stages are dropped, so that the times of two modes can be compared. The stages are 'read' (the
    draft for the gate), 'retrieve', 'fit' (shorten passages to the prompt) and 'answer'.
    """
    seconds = {stage: duration for stage, duration in answer.seconds.items() if stage in stages}
    return replace(answer, seconds={**seconds, "total": sum(seconds.values())}, draft=None)
