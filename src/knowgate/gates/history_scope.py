"""Access to the history log for gates that use earlier questions and whether the current LLM knew them."""

from __future__ import annotations

import functools

from knowgate.core.redaction import redact_secrets
from knowgate.data.history import history_exists, open_history
from knowgate.data.history.entries import HistoryScope
from knowgate.data.history.store import HistoryStore
from knowgate.errors import BadSetting


@functools.lru_cache(maxsize=8)  # the store keeps its vector index in memory
def _open_cached(path: str, embedder: str | None) -> HistoryStore:
    """Open a log, reusing the store of an earlier call with the same arguments."""
    return open_history(path, embedder)


def open_history_store(history: str | HistoryStore, embedder: str | None = None) -> HistoryStore:
    """Open the log at a path or database address. A store that is already open is returned unchanged."""
    return _open_cached(history, embedder) if isinstance(history, str) else history


def bind_scope(
    history: str | HistoryStore, model: str, prompts: str, tenant: str, embedder: str | None = None
) -> HistoryScope:
    """Return the scope of logged questions for a model, its prompts and a tenant (customer).

    Args:
        history: Path or address of the log, or an open store.
        model: Fingerprint of the model.
        prompts: Fingerprint of the answer prompts.
        tenant: Tenant whose questions are used.
        embedder: Embedding model. Default: the embedding model of the log.

    Returns:
        The scope, an argument of all searches in the log.

    Raises:
        BadSetting: The log is missing or has no entries for this model, or its address contains a password.
    """
    if isinstance(history, str):
        _check_address(history)
    scope = HistoryScope(model, prompts, tenant)
    store = open_history_store(history, embedder)
    if not store.count(scope):
        raise _make_empty_error(history if isinstance(history, str) else "FILE", store, scope)
    return scope


def _make_empty_error(path: str, store: HistoryStore, scope: HistoryScope) -> BadSetting:
    """Build the error for a log without entries of a scope. The error lists the scopes that the log has."""
    counts = "; ".join(f"{count} for {_format_scope(logged)}" for logged, count in store.scopes().items())
    return BadSetting(
        f"the log '{path}' has no questions answered by {_format_scope(scope)}. It has: {counts or 'none at all'}. Run "
        "`knowgate label` with this model, then `knowgate history import`."
    )


def _check_address(history: str) -> None:
    """Raise BadSetting if a log does not exist, or its address contains a password."""
    redacted = redact_secrets(history)
    if redacted != history:
        raise BadSetting(
            f"the address {redacted} of the log contains a password, which reports would show. Remove the password from the "
            "address. Set PGPASSWORD instead, or use ~/.pgpass."
        )
    if not history_exists(history):
        raise BadSetting(f"there is no log of questions at '{history}'. Create one: `knowgate history import`.")


def _format_scope(scope: HistoryScope) -> str:
    """Format a scope for error messages."""
    tenant = f", tenant {scope.tenant}" if scope.tenant else ""
    return f"model {scope.model}, prompts {scope.prompts}{tenant}"
