"""The embedding a log is compared by: the one it was filled with, whoever opens it. Knows no rows and no labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from knowgate.embedding import DEFAULT, SentenceEmbedder
from knowgate.errors import BadSetting
from knowgate.history.entries import Embedding
from knowgate.types import Embedder, Vector

NAME, DIGEST = "embedder_name", "embedder"  # in the log's table `meta`; logs of earlier versions have no name


class Kept(Protocol):
    """Where a log is kept: an SQLite file or a database."""

    @property
    def path(self) -> Path | str: ...
    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...


class Writing(Protocol):
    """A transaction that writes."""

    def execute(self, query: str, values: Sequence[Any], /) -> Any: ...


class ChosenEmbedder:
    """given: an embedding, or the name of one; None for the log's own, which is `minilm` where there is none yet."""

    def __init__(self, db: Kept, given: str | Embedder | None = None):
        self._db = db
        self._given = given
        self._is_agreed = False

    def embed(self, texts: Sequence[str]) -> Vector:
        if not self._is_agreed:  # who filled a log first has chosen, once and for all
            self._check(self._kept(DIGEST))
        return self._embedder.embed(list(texts))

    def agree(self, db: Writing) -> None:
        """Within a transaction that writes: the first one to fill a log chooses its embedding."""
        db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", [DIGEST, self._embedder.fingerprint])
        there = db.execute("SELECT value FROM meta WHERE key = ?", [DIGEST]).fetchone()[0]
        self._check(there)
        if self._name:
            db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", [NAME, self._name])

    @property
    def kept(self) -> Embedding:
        return Embedding(self._kept(NAME), self._kept(DIGEST))

    @property
    def fingerprint(self) -> str:
        return self._embedder.fingerprint

    @cached_property
    def _embedder(self) -> Embedder:
        if self._given is None or isinstance(self._given, str):
            return SentenceEmbedder(self._given or self._kept(NAME) or DEFAULT)
        return self._given

    @property
    def _name(self) -> str:
        """'' for one that was handed over: it cannot be opened by name."""
        return self._embedder.spec if isinstance(self._embedder, SentenceEmbedder) else ""

    def _kept(self, key: str) -> str | None:
        rows = self._db.read("SELECT value FROM meta WHERE key = ?", [key])
        return str(rows[0][0]) if rows else None

    def _check(self, there: str | None) -> None:
        mine = self._embedder.fingerprint
        self._is_agreed = there == mine
        if there in (None, mine):
            return
        path, kept = self._db.path, self._kept(NAME)
        filled = f"'{kept}'" if kept else f"one of fingerprint {str(there)[:12]}"
        own = "Leave --embedder out to use it" if kept else "Name it with --embedder"
        raise BadSetting(
            f"the log {path} was filled with another embedding ({filled}) than '{self._name or mine[:12]}'. {own}, or "
            f"fill a new log: knowgate history export --history {path} > log.jsonl; "
            f"knowgate history import log.jsonl --history NEW.db --embedder {self._name or DEFAULT}"
        )
