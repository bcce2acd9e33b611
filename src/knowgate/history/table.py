"""A row of the log's table and the entry it stands for. Knows columns and types; not the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source
from knowgate.typed import Between, read_record
from knowgate.types import Vector

COLUMNS = "id, question, label, outcome, source, weight, model, prompts, tenant, created, expires"
# an update keeps the row's number, so an index that has it need not hear of it: labels are read at search
INSERT = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""


@dataclass(frozen=True)
class StoredEntry:
    """A row of the table, in the order of `COLUMNS`."""

    id: int
    question: str
    label: Known
    outcome: Outcome | None
    source: Source
    weight: Annotated[float, Between(0, 1e6)]
    model: str
    prompts: str
    tenant: str
    created: float
    expires: float | None


def to_row(entry: LogEntry, vector: Vector) -> tuple[Any, ...]:
    scope = entry.scope
    blob = np.asarray(vector, dtype=np.float32).tobytes()
    return (
        entry.key, entry.question, entry.label, entry.outcome, entry.source, entry.trust,
        scope.model, scope.prompts, scope.tenant, entry.created, entry.expires, blob,
    )  # fmt: skip


def from_row(row: Sequence[Any]) -> LogEntry:
    """BadInput where a value is not what its column should hold: sqlite takes anything."""
    stored = read_record(StoredEntry, list(row), f"entry {row[0]}")
    scope = Scope(stored.model, stored.prompts, stored.tenant)
    return LogEntry(
        stored.question, stored.label, scope, stored.source, stored.outcome, stored.weight, stored.created,
        stored.expires, stored.id,
    )  # fmt: skip
