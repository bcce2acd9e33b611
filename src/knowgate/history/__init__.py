"""The log of what was asked before, with what the LLM knew. One file = one store; `sqlite` is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.history.entries import HistoryStore
from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec


if TYPE_CHECKING:
    from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "HistoryStore",
    "Known",
    "LogEntry",
    "Outcome",
    "STORES",
    "Scope",
    "Source",
    "open_history",
]

STORES = {"sqlite": Entry("knowgate.history.sqlite:SqliteHistory", "sqlite:FILE, or just FILE", extra="local")}


def open_history(spec: str) -> HistoryStore:
    """The log a spec names: a file path, or 'store:value'."""
    name, value = split_spec(spec)
    if name in STORES and value:
        store: HistoryStore = resolve(STORES, "history store", name, "knowgate.history")(value)
        return store
    default: HistoryStore = resolve(STORES, "history store", "sqlite")(spec)
    return default
