"""The history log of earlier questions, each with whether the LLM knew the answer, in SQLite or PostgreSQL."""

from __future__ import annotations

from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.registry import RegistryEntry, load_entry
from knowgate.core.validation import expand_path
from knowgate.data.history.store import HistoryStore
from knowgate.types import Embedder

SPEC_PREFIX = "history:"  # optional prefix of any spec
HISTORY_STORES = {
    "sqlite": RegistryEntry("knowgate.data.history.sqlite_store:SqliteHistory", "sqlite:FILE, or just FILE", extra="local"),
    "postgresql": RegistryEntry("knowgate.data.history.postgres_store:PostgresHistory",
        "postgresql://USER@HOST/DATABASE?schema=NAME", extra="postgres"),
}  # fmt: skip


def open_history(spec: str, embedder: str | Embedder | None = None) -> HistoryStore:
    """Open a history log. A new log is created on first use.

    Args:
        spec: Path of an SQLite file, or 'postgresql://USER@HOST/DATABASE'.
        embedder: Sentence embedding that compares questions, such as 'mpnet'. None uses the embedding that the log was
            filled with, or 'minilm' for a new log.
    """
    spec = spec.removeprefix(SPEC_PREFIX)
    name = "postgresql" if is_postgres_address(spec) else "sqlite"
    store: HistoryStore = load_entry(HISTORY_STORES, "history store", name)(spec.removeprefix("sqlite:"), embedder)
    return store


def history_exists(spec: str) -> bool:
    """Return whether a history log exists, without creating it."""
    spec = spec.removeprefix(SPEC_PREFIX)
    if is_postgres_address(spec):
        return bool(load_entry(HISTORY_STORES, "history store", "postgresql")(spec).exists)
    return expand_path(spec.removeprefix("sqlite:")).is_file()
