"""Entries of the history log, the protocol of a store, and conversion of entries to JSON records and table rows."""

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

MAX_QUESTION_CHARS = 20_000
MAX_TIMESTAMP = 1e11  # seconds since 1970: the year 5138
COPY_BATCH = 500
SELECTED_COLUMNS = "id, question, label, outcome, source, weight, model, prompts, tenant, created, expires"
# An update keeps the id of the row, so an index that has it stays valid: labels are read when searching.
INSERT_ENTRY = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""


class KnowledgeLabel(StrEnum):
    """Whether the LLM knows the answer; answers that change with time have a label of their own."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    TIME_SENSITIVE = "time-sensitive"


class RetrievalOutcome(StrEnum):
    """What retrieval did to the answer (SKR)."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


class LabelSource(StrEnum):
    """Where a label comes from, from most to least trusted."""

    HUMAN = "human"
    GOLD = "gold"
    JUDGE = "judge"
    AGREEMENT = "agreement"


SOURCE_WEIGHTS = {LabelSource.HUMAN: 1.0, LabelSource.GOLD: 1.0, LabelSource.JUDGE: 0.8, LabelSource.AGREEMENT: 0.5}


@dataclass(frozen=True)
class HistoryScope:
    """The model, prompts and tenant that labels belong to; labels of other scopes are never mixed in.

    Attributes:
        model: Fingerprint of the model.
        prompts: Fingerprint of the prompts.
        tenant: Name of the tenant; "" if there is only one.
    """

    model: str
    prompts: str
    tenant: str = ""


@dataclass(frozen=True)
class LogEntry:
    """A logged question with its label. A newer entry of the same question, scope and source replaces it.

    Attributes:
        outcome: What retrieval did to the answer, if known.
        weight: Weight of the label; None for the weight of its source.
        created: Unix time of creation.
        expires: Unix time from which on the entry is ignored; None for never.
        id: Row id, assigned by the store.
    """

    question: str
    label: KnowledgeLabel
    scope: HistoryScope
    source: LabelSource = LabelSource.GOLD
    outcome: RetrievalOutcome | None = None
    weight: float | None = None
    created: float = field(default_factory=time.time)
    expires: float | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise BadInput("a logged question must not be empty.")
        if len(self.question) > MAX_QUESTION_CHARS:
            raise BadInput(
                f"a logged question has {len(self.question)} characters. At most {MAX_QUESTION_CHARS} are allowed."
            )

    @property
    def key(self) -> str:
        """Key of the question; see `question_key`."""
        return question_key(self.question)

    @property
    def trust(self) -> float:
        """Weight of the label."""
        return SOURCE_WEIGHTS[self.source] if self.weight is None else self.weight


def question_key(question: str) -> str:
    """Return a key that is equal for questions that differ only in case, punctuation or articles."""
    return sha256_text(normalize(question) or question.strip())[:24]


@dataclass(frozen=True)
class LogEmbedding:
    """The embedding that a log was filled with.

    Attributes:
        name: Name of the embedding; None if it has none.
        fingerprint: Fingerprint of the embedding; None for an empty log.
    """

    name: str | None
    fingerprint: str | None


class HistoryStore(Protocol):
    """A log of labeled questions with nearest-neighbor search; several processes may write to it."""

    @property
    def embedding(self) -> LogEmbedding: ...
    def uses_embedding(self, embedding: LogEmbedding) -> bool: ...
    def embed(self, questions: Sequence[str]) -> Vector: ...
    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int: ...
    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int: ...
    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int: ...
    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]: ...
    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]: ...
    def find_ids(self, key: str) -> list[int]: ...
    def scopes(self) -> dict[HistoryScope, int]: ...
    def count(self, scope: HistoryScope) -> int: ...
    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]: ...
    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]: ...
    def sample(
        self, k: int, scope: HistoryScope, seed: int = 0, exclude: Collection[KnowledgeLabel] = ()
    ) -> tuple[Neighbor, ...]: ...


def copy_history(source: HistoryStore, target: HistoryStore) -> int:
    """Copy all entries of a log into another one; entries that are there already are replaced.

    Vectors are copied, or computed again if the target uses another embedding.

    Returns:
        The number of copied entries.
    """
    count, is_same = 0, None
    for entries, vectors in source.batches(COPY_BATCH):
        is_same = target.uses_embedding(source.embedding) if is_same is None else is_same
        count += target.add(entries, vectors if is_same else None)
    return count


# --- JSON records ---------------------------------------------------------------------------------


def entry_to_record(entry: LogEntry) -> dict[str, Any]:
    """Convert an entry to a flat record, as `history export` prints it."""
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def entry_from_record(record: Mapping[str, Any], where: str) -> LogEntry:
    """Parse a record of `history export`; `where` names its location in errors."""
    for key in ("weight", "created", "expires"):
        value = record.get(key)
        check_number(0 if value is None else value, f"'{key}' of {where}", maximum=MAX_TIMESTAMP)
    try:
        return LogEntry(
            _check_question(record["question"]),
            KnowledgeLabel(record["label"]),
            HistoryScope(str(record["model"]), str(record["prompts"]), str(record.get("tenant") or "")),
            LabelSource(record.get("source") or "human"),
            RetrievalOutcome(record["outcome"]) if record.get("outcome") else None,
            record.get("weight"),
            record.get("created") or time.time(),
            record.get("expires"),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{where}: {error}. Expected question, label (known, unknown, time-sensitive), model, prompts."
        ) from None


def _check_question(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the question is {format_value(value)}")
    check_encodable(value, "the question")
    return value


# --- table rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryRow:
    """A row of the table, in the order of `SELECTED_COLUMNS`."""

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
    """Convert an entry to the values of `INSERT_ENTRY`."""
    scope = entry.scope
    blob = np.asarray(vector, dtype=np.float32).tobytes()
    return (
        entry.key, entry.question, entry.label, entry.outcome, entry.source, entry.trust,
        scope.model, scope.prompts, scope.tenant, entry.created, entry.expires, blob,
    )  # fmt: skip


def entry_from_row(row: Sequence[Any]) -> LogEntry:
    """Parse a row; raises BadInput for a wrong value, since SQLite stores anything in any column."""
    stored = read_record(EntryRow, list(row), f"entry {row[0]}")
    scope = HistoryScope(stored.model, stored.prompts, stored.tenant)
    return LogEntry(
        stored.question, stored.label, scope, stored.source, stored.outcome, stored.weight, stored.created,
        stored.expires, stored.id,
    )  # fmt: skip
