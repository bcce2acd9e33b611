"""The log of what was asked before, with what the LLM knew. One file = one store; `sqlite` is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.history.entries import HistoryStore
from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec
from knowgate.types import Embedder

if TYPE_CHECKING:
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
    "entry_of",
    "entry_record",
    "open_history",
    "question_key",
]

STORES = {"sqlite": Entry("knowgate.history.sqlite:SqliteHistory", "sqlite:FILE, or just FILE", extra="local")}


def open_history(spec: str, embedder: str | Embedder | None = None) -> HistoryStore:
    """The log a spec names: a file path, or 'store:value'.

    embedder: what its questions are compared by, `mpnet` say; None for that the log was filled with (else `minilm`).
    """
    name, value = split_spec(spec)
    if name in STORES and value:
        store: HistoryStore = resolve(STORES, "history store", name, "knowgate.history")(value, embedder)
        return store
    default: HistoryStore = resolve(STORES, "history store", "sqlite")(spec, embedder)
    return default
