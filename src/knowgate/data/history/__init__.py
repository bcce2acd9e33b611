"""The history log of earlier questions, each with whether the LLM knew the answer, in SQLite or PostgreSQL."""

from __future__ import annotations

from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, split_spec
from knowgate.core.validation import expand_path
from knowgate.data.history.entries import HistoryStore
from knowgate.types import Embedder

PLUGIN_GROUP = "knowgate.history"  # entry points of other packages
SPEC_PREFIX = "history:"  # optional prefix of any spec
HISTORY_STORES = {
    "sqlite": RegistryEntry("knowgate.data.history.sqlite_store:SqliteHistory", "sqlite:FILE, or just FILE", extra="local"),
    "postgresql": RegistryEntry("knowgate.data.history.postgres_store:PostgresHistory",
        "postgresql://USER@HOST/DATABASE?schema=NAME", extra="postgres"),
}  # fmt: skip


def open_history(spec: str, embedder: str | Embedder | None = None) -> HistoryStore:
    """Open a history log. A new log is created on first use.

    Args:
        spec: Path of an SQLite file, 'postgresql://USER@HOST/DATABASE', or 'STORE:VALUE' for a store of a plugin.
        embedder: Sentence embedding that compares questions, such as 'mpnet'. None uses the embedding that the log was
            filled with, or 'minilm' for a new log.
    """
    spec = spec.removeprefix(SPEC_PREFIX)
    name, value = ("postgresql", spec) if is_postgres_address(spec) else split_spec(spec)
    if not value or (name not in HISTORY_STORES and name not in find_plugins(PLUGIN_GROUP)):
        name, value = "sqlite", spec  # the whole spec is the path of a file
    store: HistoryStore = load_entry(HISTORY_STORES, "history store", name, PLUGIN_GROUP)(value, embedder)
    return store


def history_exists(spec: str) -> bool:
    """Return whether a history log exists, without creating it."""
    spec = spec.removeprefix(SPEC_PREFIX)
    if is_postgres_address(spec):
        return bool(load_entry(HISTORY_STORES, "history store", "postgresql")(spec).exists)
    return expand_path(spec.removeprefix("sqlite:")).is_file()
