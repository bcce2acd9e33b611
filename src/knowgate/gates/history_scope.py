"""What gates share that look into the log: opening it, and making sure its labels are of this LLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from knowgate.core.redaction import redact_secrets
from knowgate.data.history import history_exists, open_history
from knowgate.data.history.entries import HistoryScope, HistoryStore
from knowgate.errors import BadSetting


@functools.lru_cache(maxsize=8)
def _opened(path: str, embedder: str | None) -> HistoryStore:
    """One store per path: its index in memory is worth keeping."""
    return open_history(path, embedder)


def open_history_store(history: str | HistoryStore, embedder: str | None = None) -> HistoryStore:
    """The log behind a path, or the store itself."""
    return _opened(history, embedder) if isinstance(history, str) else history


def bind_scope(
    history: str | HistoryStore, model: str, prompts: str, tenant: str, embedder: str | None = None
) -> HistoryScope:
    """The scope of this model and wording; refuses a log that holds only labels of others, and an empty one."""
    path = redact_secrets(history) if isinstance(history, str) else "FILE"
    if path != history and isinstance(history, str):
        raise BadSetting(
            f"the log {path} is named with a password, and gates are named in reports and decisions: write the address "
            "without it, and leave it to PGPASSWORD or ~/.pgpass."
        )
    if isinstance(history, str) and not history_exists(history):
        raise BadSetting(f"there is no log at '{path}'. Make one: knowgate history import RUN --history {path}")
    scope, store = HistoryScope(model, prompts, tenant), open_history_store(history, embedder)
    if store.count(scope):
        return scope
    there = store.scopes()
    if not there:
        raise BadSetting(f"the log '{path}' is empty. Fill it: knowgate history import RUN --history {path}")
    raise BadSetting(
        f"the log '{path}' has no labels for this model and prompts ({_name(scope)}); it has {_listed(there)}. "
        f"Label with this model and import: knowgate history import RUN --history {path}"
    )


def _name(scope: HistoryScope) -> str:
    tenant = f", tenant {scope.tenant}" if scope.tenant else ""
    return f"model {scope.model}, prompts {scope.prompts}{tenant}"


def _listed(scopes: Mapping[HistoryScope, int]) -> str:
    return "; ".join(f"{count} for {_name(scope)}" for scope, count in scopes.items())
