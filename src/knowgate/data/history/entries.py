"""Entries of the history log, the protocol that every log store implements, and conversion to JSON and SQL rows."""

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

MAX_QUESTION_CHARS = 20_000  # a longer text is a text to work on, not a question
MAX_TIMESTAMP = 1e11  # seconds since 1970: the year 5138
COPY_BATCH = 500  # entries copied per transaction
SELECTED_COLUMNS = "id, question, label, outcome, source, weight, model, prompts, tenant, created, expires"
# An update keeps the id and vector of the row, so vector indexes stay valid. Labels are read from the table.
INSERT_ENTRY = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""


class KnowledgeLabel(StrEnum):
    """Whether the LLM knows the answer. Questions whose answers change over time have a label of their own."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    TIME_SENSITIVE = "time-sensitive"


class RetrievalOutcome(StrEnum):
    """How retrieval changed the answer of the LLM: made it better, worse, or left it the same."""

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
        label: Whether the LLM knows the answer.
        scope: Model, prompts and tenant that the label belongs to.
        source: Where the label comes from.
        outcome: How retrieval changed the answer; None if unknown.
        weight: Trust in the label; None for the default of its source.
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
            raise BadInput("the question is empty, so it cannot be added to the history log. Give its text.")
        if len(self.question) > MAX_QUESTION_CHARS:
            raise BadInput(
                f"the question is too long for the history log: it has {len(self.question)} characters. Use at most "
                f"{MAX_QUESTION_CHARS}."
            )

    @property
    def key(self) -> str:
        """Hash of the question that ignores case, punctuation and articles."""
        return question_key(self.question)

    @property
    def trust(self) -> float:
        """Trust in the label: its weight, or the default weight of its source."""
        return SOURCE_WEIGHTS[self.source] if self.weight is None else self.weight


def question_key(question: str) -> str:
    """Return a hash of a question; questions that differ only in case, punctuation or articles have the same one."""
    return sha256_text(normalize(question) or question.strip())[:24]


@dataclass(frozen=True)
class LogEmbedding:
    """The sentence embedding that a log was filled with.

    Attributes:
        name: Name by which the embedding can be loaded; None if it was given as an object.
        fingerprint: Fingerprint of the embedding; None for an empty log.
    """

    name: str | None
    fingerprint: str | None


class HistoryStore(Protocol):
    """A log of labeled questions with nearest-neighbor search; several processes may write to it.

    `add`, `forget` (by id or text) and `prune` (expired entries) return the number of entries. `scopes` returns the
    number of entries by scope. `batches` and `outcomes` also return the vectors of the questions. `search` finds similar
    questions, and `sample` draws questions at random.
    """

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
    """Copy all entries of a log into another log; entries that exist in the target are replaced.

    The vectors are copied, too. If the target uses another embedding, they are computed again.

    Returns:
        The number of copied entries.
    """
    count = 0
    has_same_embedding: bool | None = None  # set with the first batch: copying an empty log loads no embedding
    for entries, vectors in source.batches(COPY_BATCH):
        if has_same_embedding is None:
            has_same_embedding = target.uses_embedding(source.embedding)
        count += target.add(entries, vectors if has_same_embedding else None)
    return count


# --- JSON records ---------------------------------------------------------------------------------


def entry_to_record(entry: LogEntry) -> dict[str, Any]:
    """Convert an entry to a flat JSON object, as `history export` prints it."""
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def entry_from_record(record: Mapping[str, Any], where: str) -> LogEntry:
    """Parse a JSON object that `history export` printed; raises BadInput if it is invalid.

    Args:
        record: JSON object.
        where: File and line of the record, for error messages.
    """
    for key in ("weight", "created", "expires"):  # optional numbers; None passes the check as 0
        value = record.get(key)
        check_number(0 if value is None else value, f"'{key}' of {where}", maximum=MAX_TIMESTAMP)
    try:
        return LogEntry(
            question=_check_question(record["question"]),
            label=KnowledgeLabel(record["label"]),
            scope=HistoryScope(str(record["model"]), str(record["prompts"]), str(record.get("tenant") or "")),
            source=LabelSource(record.get("source") or "human"),
            outcome=RetrievalOutcome(record["outcome"]) if record.get("outcome") else None,
            weight=record.get("weight"),
            created=record.get("created") or time.time(),
            expires=record.get("expires"),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{where} is not a valid history entry: {error}. Required fields: question, label (known, unknown or "
            "time-sensitive), model and prompts."
        ) from None


def _check_question(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'question' must be a text, not {format_value(value)}")
    check_encodable(value, "the question")
    return value


# --- table rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryRow:
    """A row of the SQL table `entries`, with its columns in the order of `SELECTED_COLUMNS`."""

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
    """Convert an entry and its vector to the values that the SQL statement `INSERT_ENTRY` needs."""
    scope = entry.scope
    blob = np.asarray(vector, dtype=np.float32).tobytes()
    return (
        entry.key, entry.question, entry.label, entry.outcome, entry.source, entry.trust,
        scope.model, scope.prompts, scope.tenant, entry.created, entry.expires, blob,
    )  # fmt: skip


def entry_from_row(row: Sequence[Any]) -> LogEntry:
    """Parse a row of the SQL table; raises BadInput for an invalid value, since SQLite does not check types."""
    stored = read_record(EntryRow, list(row), f"entry {row[0]}")
    scope = HistoryScope(stored.model, stored.prompts, stored.tenant)
    return LogEntry(
        stored.question, stored.label, scope, stored.source, stored.outcome, stored.weight, stored.created,
        stored.expires, stored.id,
    )  # fmt: skip
