"""Entries of the history log, and their conversion to JSON and SQL rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from knowgate.core.files import sha256_text
from knowgate.core.schema import NumberRange, read_record
from knowgate.core.text import normalize, normalize_unicode
from knowgate.core.validation import check_encodable
from knowgate.errors import BadInput

MAX_QUESTION_CHARS = 20_000  # a longer text is a text to work on, not a question
MAX_EXPANSION = 18  # letters that one character can become by Unicode normalization
PART_CHARS = 1_000  # characters that are normalized at once
MAX_TIMESTAMP = 1e11  # seconds since 1970: the year 5138
MAX_WEIGHT = 1e6
COLUMNS = ("id", "question", "label", "outcome", "source", "weight", "model", "prompts", "tenant", "created", "expires")
SELECTED_COLUMNS = ", ".join(COLUMNS)
ENTRY_COLUMNS = frozenset({*COLUMNS, "key", "vector"})
Timestamp = Annotated[float, NumberRange(0, MAX_TIMESTAMP)]
# An update keeps the id and vector of the row, so vector indexes stay valid. Labels are read from the table.
INSERT_ENTRY = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""


class KnowledgeLabel(StrEnum):
    """Whether the LLM knows the answer. Answers that change over time have their own label."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    TIME_SENSITIVE = "time-sensitive"


class RetrievalOutcome(StrEnum):
    """How retrieval changed the answer of the LLM: better, worse or the same."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


class LabelSource(StrEnum):
    """Where a label comes from, from most to least trusted."""

    HUMAN = "human"  # a person decided
    GOLD = "gold"  # the answer was compared with a gold answer
    JUDGE = "judge"  # another LLM decided
    AGREEMENT = "agreement"  # the answer was compared with the LLM's own answer with passages


SOURCE_WEIGHTS = {LabelSource.HUMAN: 1.0, LabelSource.GOLD: 1.0, LabelSource.JUDGE: 0.8, LabelSource.AGREEMENT: 0.5}


@dataclass(frozen=True)
class HistoryScope:
    """The model, prompts and tenant of labels. Labels of different scopes are never mixed.

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
    """A logged question with its label. Each question has one entry per scope and source.

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
    weight: Annotated[float, NumberRange(0, MAX_WEIGHT)] | None = None
    created: Timestamp = field(default_factory=time.time)
    expires: Timestamp | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        """Raise BadInput if the question is empty or too long."""
        if not self.question.strip():
            raise BadInput("the question is empty, so it cannot be added to the history log. Give its text.")
        if len(self.question) > MAX_QUESTION_CHARS:
            raise BadInput(
                f"the question is too long for the history log: it has {len(self.question)} characters. Use at most "
                f"{MAX_QUESTION_CHARS}."
            )

    @cached_property
    def key(self) -> str:
        """Hash of the question that ignores case, punctuation and articles."""
        return question_key(self.question)

    @property
    def trust(self) -> float:
        """Trust in the label: its weight, or the default weight of its source."""
        return SOURCE_WEIGHTS[self.source] if self.weight is None else self.weight


def is_too_long(text: str) -> bool:
    """Return whether a text is longer than a question may be. Some characters count as up to 18 letters."""
    if len(text) > MAX_QUESTION_CHARS:
        return True
    if get_max_normalized_length(text) <= MAX_QUESTION_CHARS:
        return False
    n_chars = 0
    # In parts, because normalization blocks all threads, and most of a text that is too long need not be normalized.
    for start in range(0, len(text), PART_CHARS):
        n_chars += len(normalize_unicode(text[start : start + PART_CHARS]))
        if n_chars > MAX_QUESTION_CHARS:
            return True
    return False


def get_max_normalized_length(text: str) -> int:
    """Return how many characters a text can have at most after Unicode normalization."""
    return len(text) if text.isascii() else len(text) * MAX_EXPANSION


def question_key(question: str) -> str:
    """Return a hash of a question; questions that differ only in case, punctuation or articles have the same one."""
    return sha256_text(normalize(question) or question.strip())[:24]


# --- conversion -----------------------------------------------------------------------------------


def entry_to_record(entry: LogEntry) -> dict[str, Any]:
    """Convert an entry to a flat JSON object, as `history export` prints it."""
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def entry_from_record(record: Mapping[str, Any], where: str) -> LogEntry:
    """Parse a JSON object of `history export` into a log entry.

    Args:
        record: JSON object. Labels without a source count as given by a person.
        where: File and line of the record, for error messages.
    """
    try:
        entry = _parse_values({"source": LabelSource.HUMAN, **_drop_empty(record), "id": None}, where)
    except BadInput as error:
        raise BadInput(
            f"an entry of the question log is invalid: {str(error).rstrip('.')}. Required fields: question, label (known, "
            "unknown or time-sensitive), model and prompts."
        ) from None
    check_encodable(entry.question, "the question")
    return entry


def entry_from_row(row: Sequence[Any]) -> LogEntry:
    """Parse a row of the SQL table, with values in the order of `COLUMNS`.

    SQLite does not check types, so this does.
    """
    return _parse_values(_drop_empty(dict(zip(COLUMNS, row, strict=True))), f"entry {row[0]}")


def entry_to_row(entry: LogEntry) -> list[Any]:
    """Convert an entry to values for `INSERT_ENTRY`. The caller appends the vector."""
    scope = entry.scope
    outcome = None if entry.outcome is None else entry.outcome.value
    names = [entry.key, entry.question, entry.label.value, outcome, entry.source.value]
    return [*names, entry.trust, scope.model, scope.prompts, scope.tenant, entry.created, entry.expires]


def _drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}


def _parse_values(values: Mapping[str, Any], where: str) -> LogEntry:
    """Make a log entry from an exported record or a row of the database.

    Args:
        values: The fields by name. Unknown ones are ignored.
        where: File and line, or id of the entry, for error messages.
    """
    scope = {name: values[name] for name in ("model", "prompts", "tenant") if name in values}
    return read_record(LogEntry, {**values, "scope": scope}, where, ignore_unknown=True)
