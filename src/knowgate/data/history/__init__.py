"""The log of what was asked before, with what the LLM knew. One file = one store; `sqlite` is the default."""

from __future__ import annotations

from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.registry import RegistryEntry, load_entry, split_spec
from knowgate.core.validation import expand_path
from knowgate.data.history.entries import HistoryStore
from knowgate.types import Embedder

HISTORY_STORES = {
    "sqlite": RegistryEntry(
        "knowgate.data.history.sqlite_store:SqliteHistory", "sqlite:FILE, or just FILE", extra="local"
    ),
    "postgresql": RegistryEntry(
        "knowgate.data.history.postgres_store:PostgresHistory",
        "postgresql://USER@HOST/DATABASE?schema=NAME",
        extra="postgres",
    ),
}
SPEC_PREFIX = "history:"  # may stand before any of them


def open_history(spec: str, embedder: str | Embedder | None = None) -> HistoryStore:
    """The log a spec names: a file path, the address of a database, or 'store:value'.

    embedder: what its questions are compared by, `mpnet` say; None for that the log was filled with (else `minilm`).
    """
    spec = spec.removeprefix(SPEC_PREFIX)
    name, value = split_spec(spec)
    if is_postgres_address(spec):
        name, value = "postgresql", spec
    if name in HISTORY_STORES and value:
        store: HistoryStore = load_entry(HISTORY_STORES, "history store", name, "knowgate.history")(value, embedder)
        return store
    default: HistoryStore = load_entry(HISTORY_STORES, "history store", "sqlite")(spec, embedder)
    return default


def history_exists(spec: str) -> bool:
    """Whether there is such a log; looking makes none."""
    spec = spec.removeprefix(SPEC_PREFIX)
    if is_postgres_address(spec):
        return bool(load_entry(HISTORY_STORES, "history store", "postgresql")(spec).is_made)
    return expand_path(spec.removeprefix("sqlite:")).is_file()
