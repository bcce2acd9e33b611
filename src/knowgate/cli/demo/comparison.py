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

from knowgate.core.text import grade_contains
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
    """Load the messages of the demo in order. Follow-ups refer to earlier messages.

    Args:
        limit: Load only the first messages, at most this many.
        name: File in the data folder of the demo.
    """
    return load_questions(f"jsonl:{demo_folder() / name}", limit)


@dataclass(frozen=True)
class DelayedRetriever:
    """Retriever with a delay of some seconds, like a hosted search service."""

    inner: Retriever  # does the search
    seconds: float  # waited before each search

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        time.sleep(self.seconds)
        return self.inner.search(queries, k)


AnswersByMode = dict[str, Answer]


def is_right(answer: Answer) -> bool | None:
    """Return whether an answer is right; None for messages without a gold answer, such as greetings."""
    return grade_contains(answer.text, answer.question).correct if answer.question.answers else None


@dataclass(frozen=True)
class AnswerTotals:
    """Sums over all answers of one mode.

    Attributes:
        right: Number of right answers.
        graded: Number of answers that could be graded.
        searches: Number of searches.
        seconds: Total time.
    """

    right: int
    graded: int
    searches: int
    seconds: float


def sum_answers(answers: Sequence[Answer]) -> AnswerTotals:
    """Sum the answers of one mode."""
    grades = [is_right(answer) for answer in answers]
    return AnswerTotals(
        right=grades.count(True),
        graded=len(grades) - grades.count(None),
        searches=sum(answer.decision.retrieve for answer in answers),
        seconds=sum(answer.seconds["total"] for answer in answers),
    )


def answer_in_modes(conversation: Conversation, message: Question) -> AnswersByMode:
    """Answer a message in all three modes. Answers of the gated mode are reused for the other modes.

    Args:
        conversation: Earlier messages, which follow-ups refer to. Its pipeline is gated, and only gated answers are
            remembered.
        message: The message.
    """
    rag = conversation.rag
    rewritten = conversation.rewrite(message.text)
    question = replace(message, text=rewritten.text, meta={**message.meta, **rewritten.meta})
    gated = rag.answer(question)
    never = extract_closed_book_answer(gated, rag.max_tokens) or _answer_with_gate(rag, NEVER, question)
    always = extract_open_book_answer(gated) or _answer_with_gate(rag, ALWAYS, question)
    conversation.remember(gated)
    return {NEVER: never, ALWAYS: always, GATED: gated}


def _answer_with_gate(rag: AdaptiveRAG, gate: str, question: Question) -> Answer:
    return rag.replace(gate=load_gate(gate), threshold=None).answer(question)


def extract_closed_book_answer(gated: Answer, max_tokens: int) -> Answer | None:
    """Return the answer that the gated mode gave without passages, or None.

    If the gate retrieved, the draft is this answer, but only if it is complete.

    Args:
        gated: The answer of the gated mode.
        max_tokens: Maximum length of an answer, to tell whether the draft is complete.
    """
    if not gated.decision.retrieve:
        return _keep_stage_times(gated, "read", "answer")
    if gated.draft is None or not is_complete_draft(gated.draft, max_tokens):
        return None
    decision = replace(gated.decision, retrieve=False)
    closed_book = replace(gated, text=gated.draft.text, n_tokens=gated.draft.n_tokens, passages=(), decision=decision)
    return _keep_stage_times(closed_book, "read")


def extract_open_book_answer(gated: Answer) -> Answer | None:
    """Return the answer that the gated mode gave with passages, even if the arbiter rejected it.

    None if nothing was retrieved.
    """
    if not gated.passages:
        return None
    answer = replace(gated, text=gated.choice.open) if gated.choice else gated
    return _keep_stage_times(answer, "retrieve", "fit", "answer")


def _keep_stage_times(answer: Answer, *stages: str) -> Answer:
    """Return a copy of an answer with the times of these stages only, and without its draft.

    The stages are 'read' (reading the question and drafting), 'retrieve', 'fit' (choosing the passages that fit into the
    prompt) and 'answer'.
    """
    seconds = {stage: duration for stage, duration in answer.seconds.items() if stage in stages}
    return replace(answer, seconds={**seconds, "total": sum(seconds.values())}, draft=None)
