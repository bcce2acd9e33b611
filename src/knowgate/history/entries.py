"""The record of one logged question, the scope it counts in, and what a store of them must do."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from knowgate.errors import BadInput
from knowgate.files import sha256_text
from knowgate.text import normalise
from knowgate.types import Neighbour, Vector


class Known(StrEnum):
    """Does the LLM know the answer? What changes with time it does not, whatever it said last year."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    TIME_SENSITIVE = "time-sensitive"


class Outcome(StrEnum):
    """What retrieval did to the answer (SKR)."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


class Source(StrEnum):
    """Who says so, from most to least trusted."""

    HUMAN = "human"
    GOLD = "gold"
    JUDGE = "judge"
    AGREEMENT = "agreement"


WEIGHTS = {Source.HUMAN: 1.0, Source.GOLD: 1.0, Source.JUDGE: 0.8, Source.AGREEMENT: 0.5}
LONGEST = 20_000  # characters of a question that are kept


@dataclass(frozen=True)
class Scope:
    """Whose labels: one tenant's, for one model under one wording. Labels of others are never mixed in silently."""

    model: str
    prompts: str
    tenant: str = ""


@dataclass(frozen=True)
class LogEntry:
    """A question with its label. One per question, scope and source: a newer one replaces it."""

    question: str
    label: Known
    scope: Scope
    source: Source = Source.GOLD
    outcome: Outcome | None = None
    weight: float | None = None  # None: what the source deserves
    created: float = field(default_factory=time.time)
    expires: float | None = None
    id: int | None = None  # given by the store

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise BadInput("a logged question must not be empty.")
        if len(self.question) > LONGEST:
            raise BadInput(f"a logged question has {len(self.question)} characters; at most {LONGEST} are kept.")

    @property
    def key(self) -> str:
        """Equal for questions that differ only in case, punctuation or articles."""
        return question_key(self.question)

    @property
    def trust(self) -> float:
        return WEIGHTS[self.source] if self.weight is None else self.weight


def question_key(question: str) -> str:
    return sha256_text(normalise(question) or question.strip())[:24]


@dataclass(frozen=True)
class Embedding:
    """What a log compares by. name: None where it has none. fingerprint: None of a log that nobody filled."""

    name: str | None
    fingerprint: str | None


class HistoryStore(Protocol):
    """A log of questions with labels and nearest neighbours; safe to write from several processes."""

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int: ...
    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int: ...
    def prune(self, *, now: float | None = None, keep_scope: Scope | None = None) -> int: ...
    def entries(self, scope: Scope | None = None, limit: int | None = None) -> Iterator[LogEntry]: ...
    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]: ...
    @property
    def embedding(self) -> Embedding: ...
    def compares_by(self, embedding: Embedding) -> bool: ...
    def ids_of(self, key: str) -> list[int]: ...
    def scopes(self) -> dict[Scope, int]: ...
    def count(self, scope: Scope) -> int: ...
    def search(
        self, questions: Sequence[str], k: int, scope: Scope, leave_out: Collection[Known] = ()
    ) -> list[tuple[Neighbour, ...]]: ...
    def embed(self, questions: Sequence[str]) -> Vector: ...
    def outcomes(self, scope: Scope) -> tuple[list[Outcome], Vector]: ...
    def sample(
        self, k: int, scope: Scope, seed: int = 0, leave_out: Collection[Known] = ()
    ) -> tuple[Neighbour, ...]: ...
