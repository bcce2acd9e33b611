"""The log of what was asked before, with what the LLM knew. One file = one store; `sqlite` is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.doors import user_path
from knowgate.history.entries import HistoryStore
from knowgate.lazy import hand_on
from knowgate.postgres import is_postgres
from knowgate.registry import Entry, resolve, split_spec
from knowgate.types import Embedder

if TYPE_CHECKING:
    from knowgate.history.copying import copy_history
    from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source, question_key
    from knowgate.history.exchange import LAST_SECOND, entry_of, entry_record
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "HistoryStore",
    "Known",
    "LAST_SECOND",
    "LogEntry",
    "Outcome",
    "STORES",
    "Scope",
    "Source",
    "copy_history",
    "entry_of",
    "entry_record",
    "log_exists",
    "open_history",
    "question_key",
]

STORES = {
    "sqlite": Entry("knowgate.history.sqlite:SqliteHistory", "sqlite:FILE, or just FILE", extra="local"),
    "postgresql": Entry(
        "knowgate.history.postgres:PostgresHistory", "postgresql://USER@HOST/DATABASE?schema=NAME", extra="postgres"
    ),
}
PREFIX = "history:"  # may stand before any of them


def open_history(spec: str, embedder: str | Embedder | None = None) -> HistoryStore:
    """The log a spec names: a file path, the address of a database, or 'store:value'.

    embedder: what its questions are compared by, `mpnet` say; None for that the log was filled with (else `minilm`).
    """
    spec = spec.removeprefix(PREFIX)
    name, value = split_spec(spec)
    if is_postgres(spec):
        name, value = "postgresql", spec
    if name in STORES and value:
        store: HistoryStore = resolve(STORES, "history store", name, "knowgate.history")(value, embedder)
        return store
    default: HistoryStore = resolve(STORES, "history store", "sqlite")(spec, embedder)
    return default


def log_exists(spec: str) -> bool:
    """Whether there is such a log; looking makes none."""
    spec = spec.removeprefix(PREFIX)
    if is_postgres(spec):
        return bool(resolve(STORES, "history store", "postgresql")(spec).is_made)
    return user_path(spec.removeprefix("sqlite:")).is_file()
