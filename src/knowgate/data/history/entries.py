"""A log copied into another one: entries with their vectors, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.core.schema import NumberRange, read_record
from knowgate.core.text import normalize
from knowgate.core.validation import check_encodable, check_number, format_value
from knowgate.errors import BadInput
from knowgate.types import Neighbor, Vector


class KnowledgeLabel(StrEnum):
    """Does the LLM know the answer? What changes with time it does not, whatever it said last year."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    TIME_SENSITIVE = "time-sensitive"


class RetrievalOutcome(StrEnum):
    """What retrieval did to the answer (SKR)."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


class LabelSource(StrEnum):
    """Who says so, from most to least trusted."""

    HUMAN = "human"
    GOLD = "gold"
    JUDGE = "judge"
    AGREEMENT = "agreement"


SOURCE_WEIGHTS = {LabelSource.HUMAN: 1.0, LabelSource.GOLD: 1.0, LabelSource.JUDGE: 0.8, LabelSource.AGREEMENT: 0.5}
MAX_QUESTION_CHARS = 20_000  # characters of a question that are kept


@dataclass(frozen=True)
class HistoryScope:
    """Whose labels: one tenant's, for one model under one wording. Labels of others are never mixed in silently."""

    model: str
    prompts: str
    tenant: str = ""


@dataclass(frozen=True)
class LogEntry:
    """A question with its label. One per question, scope and source: a newer one replaces it."""

    question: str
    label: KnowledgeLabel
    scope: HistoryScope
    source: LabelSource = LabelSource.GOLD
    outcome: RetrievalOutcome | None = None
    weight: float | None = None  # None: what the source deserves
    created: float = field(default_factory=time.time)
    expires: float | None = None
    id: int | None = None  # given by the store

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise BadInput("a logged question must not be empty.")
        if len(self.question) > MAX_QUESTION_CHARS:
            raise BadInput(
                f"a logged question has {len(self.question)} characters; at most {MAX_QUESTION_CHARS} are kept."
            )

    @property
    def key(self) -> str:
        """Equal for questions that differ only in case, punctuation or articles."""
        return question_key(self.question)

    @property
    def trust(self) -> float:
        return SOURCE_WEIGHTS[self.source] if self.weight is None else self.weight


def question_key(question: str) -> str:
    return sha256_text(normalize(question) or question.strip())[:24]


@dataclass(frozen=True)
class LogEmbedding:
    """What a log compares by. name: None where it has none. fingerprint: None of a log that nobody filled."""

    name: str | None
    fingerprint: str | None


class HistoryStore(Protocol):
    """A log of questions with labels and nearest neighbours; safe to write from several processes."""

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int: ...
    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int: ...
    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int: ...
    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]: ...
    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]: ...
    @property
    def embedding(self) -> LogEmbedding: ...
    def compares_by(self, embedding: LogEmbedding) -> bool: ...
    def ids_of(self, key: str) -> list[int]: ...
    def scopes(self) -> dict[HistoryScope, int]: ...
    def count(self, scope: HistoryScope) -> int: ...
    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, leave_out: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]: ...
    def embed(self, questions: Sequence[str]) -> Vector: ...
    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]: ...
    def sample(
        self, k: int, scope: HistoryScope, seed: int = 0, leave_out: Collection[KnowledgeLabel] = ()
    ) -> tuple[Neighbor, ...]: ...


COPY_BATCH = 500


def copy_history(source: HistoryStore, target: HistoryStore) -> int:
    """How many entries were copied. It may be done twice: an entry that is there is replaced.

    Vectors are worked out again only where the target compares by another embedding.
    """
    count, same = 0, None
    for entries, vectors in source.batches(COPY_BATCH):
        same = target.compares_by(source.embedding) if same is None else same
        count += target.add(entries, vectors if same else None)
    return count


MAX_TIMESTAMP = 1e11  # since 1970: the year 5138


def entry_to_record(entry: LogEntry) -> dict[str, Any]:
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def entry_from_record(record: Mapping[str, Any], where: str) -> LogEntry:
    """The entry; what is missing or unknown is named."""
    for key in ("weight", "created", "expires"):
        value = record.get(key)
        check_number(0 if value is None else value, f"'{key}' of {where}", maximum=MAX_TIMESTAMP)
    try:
        scope = HistoryScope(str(record["model"]), str(record["prompts"]), str(record.get("tenant") or ""))
        outcome = RetrievalOutcome(record["outcome"]) if record.get("outcome") else None
        return LogEntry(
            _text(record["question"]),
            KnowledgeLabel(record["label"]),
            scope,
            LabelSource(record.get("source") or "human"),
            outcome,
            record.get("weight"),
            record.get("created") or time.time(),
            record.get("expires"),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{where}: {error}. Expected question, label (known, unknown, time-sensitive), model, prompts."
        ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the question is {format_value(value)}")
    check_encodable(value, "the question")
    return value


SELECTED_COLUMNS = "id, question, label, outcome, source, weight, model, prompts, tenant, created, expires"
# an update keeps the row's number, so an index that has it need not hear of it: labels are read at search
INSERT_ENTRY = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""


@dataclass(frozen=True)
class EntryRow:
    """A row of the table, in the order of `COLUMNS`."""

    id: int
    question: str
    label: KnowledgeLabel
    outcome: RetrievalOutcome | None
    source: LabelSource
    weight: Annotated[float, NumberRange(0, 1e6)]
    model: str
    prompts: str
    tenant: str
    created: float
    expires: float | None


def entry_to_row(entry: LogEntry, vector: Vector) -> tuple[Any, ...]:
    scope = entry.scope
    blob = np.asarray(vector, dtype=np.float32).tobytes()
    return (
        entry.key, entry.question, entry.label, entry.outcome, entry.source, entry.trust,
        scope.model, scope.prompts, scope.tenant, entry.created, entry.expires, blob,
    )  # fmt: skip


def entry_from_row(row: Sequence[Any]) -> LogEntry:
    """BadInput where a value is not what its column should hold: sqlite takes anything."""
    stored = read_record(EntryRow, list(row), f"entry {row[0]}")
    scope = HistoryScope(stored.model, stored.prompts, stored.tenant)
    return LogEntry(
        stored.question, stored.label, scope, stored.source, stored.outcome, stored.weight, stored.created,
        stored.expires, stored.id,
    )  # fmt: skip
