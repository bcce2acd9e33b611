"""What all history stores share: the embedding of a log, and the selection of neighbors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from knowgate.data.history.entries import KnowledgeLabel, LogEmbedding, LogEntry, question_key
from knowgate.errors import BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder
from knowgate.types import Embedder, Neighbor, Vector

NAME_KEY, FINGERPRINT_KEY = "embedder_name", "embedder"  # keys in the table `meta`; older logs have no name
EXTRA_CANDIDATES = 8  # neighbors fetched in addition to k, since some are filtered out
DEPTH_FACTOR = 4  # fetch this many times more if too many were filtered out
SELECT_META = "SELECT value FROM meta WHERE key = ?"
INSERT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING"


class MetaReader(Protocol):
    """A database that can be read: an SQLite file or PostgreSQL."""

    @property
    def path(self) -> Path | str: ...
    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...


class WriteTransaction(Protocol):
    """A transaction that writes."""

    def execute(self, query: str, values: Sequence[Any], /) -> Any: ...


class LogEmbedder:
    """The embedding of a log, chosen by the first process that fills it.

    Args:
        database: Database of the log.
        embedder: An embedding or its name; None for the one of the log ('minilm' for a new log).
    """

    def __init__(self, database: MetaReader, embedder: str | Embedder | None = None):
        self._database = database
        self._given = embedder
        self._is_checked = False

    def embed(self, texts: Sequence[str]) -> Vector:
        """Embed texts; raises BadSetting if the log was filled with another embedding."""
        if not self._is_checked:
            self._check(self._read_meta(FINGERPRINT_KEY))
        return self._embedder.embed(list(texts))

    def register(self, transaction: WriteTransaction) -> None:
        """Record the embedding in the log within a write transaction, unless another one is recorded already."""
        transaction.execute(INSERT_META, [FINGERPRINT_KEY, self._embedder.fingerprint])
        self._check(transaction.execute(SELECT_META, [FINGERPRINT_KEY]).fetchone()[0])
        if self._name:
            transaction.execute(INSERT_META, [NAME_KEY, self._name])

    @property
    def stored(self) -> LogEmbedding:
        """The embedding that the log was filled with."""
        return LogEmbedding(self._read_meta(NAME_KEY), self._read_meta(FINGERPRINT_KEY))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the embedding in use."""
        return self._embedder.fingerprint

    @cached_property
    def _embedder(self) -> Embedder:
        if self._given is None or isinstance(self._given, str):
            return SentenceEmbedder(self._given or self._read_meta(NAME_KEY) or DEFAULT_EMBEDDER)
        return self._given

    @property
    def _name(self) -> str:
        """Name under which the embedding can be loaded; "" for an embedding object."""
        return self._embedder.spec if isinstance(self._embedder, SentenceEmbedder) else ""

    def _read_meta(self, key: str) -> str | None:
        rows = self._database.read(SELECT_META, [key])
        return str(rows[0][0]) if rows else None

    def _check(self, stored: str | None) -> None:
        """Raise BadSetting if the fingerprint stored in the log differs from that of the embedding in use."""
        fingerprint = self._embedder.fingerprint
        self._is_checked = stored == fingerprint
        if stored in (None, fingerprint):
            return
        path, name = self._database.path, self._read_meta(NAME_KEY)
        filled_with = f"'{name}'" if name else f"one with fingerprint {str(stored)[:12]}"
        advice = "Leave `embedder` out to use it" if name else "Give it as `embedder`"
        raise BadSetting(
            f"the log {path} was filled with another embedding ({filled_with}) than '{self._name or fingerprint[:12]}'. "
            f"{advice}, or copy the log into a new one that has this `embedder`: knowgate history copy {path} NEW.db"
        )


class EmbeddedHistory:
    """Base class of history stores: methods about the embedding of the log."""

    _embedder: LogEmbedder

    @property
    def embedding(self) -> LogEmbedding:
        """The embedding that the log was filled with."""
        return self._embedder.stored

    def uses_embedding(self, embedding: LogEmbedding) -> bool:
        """Return whether vectors of that embedding can be compared with those of this log."""
        return embedding.fingerprint == self._embedder.fingerprint

    def embed(self, questions: Sequence[str]) -> Vector:
        """Embed questions with the embedding of the log."""
        return self._embedder.embed(questions)


# --- neighbors ------------------------------------------------------------------------------------


def select_neighbors(
    question: str, candidates: Iterable[tuple[LogEntry, float]], exclude: Collection[KnowledgeLabel]
) -> tuple[Neighbor, ...]:
    """Drop the question itself, expired entries and excluded labels; keep the order of the candidates."""
    own_key, now = question_key(question), time.time()
    selected = [
        (entry, similarity)
        for entry, similarity in candidates
        if entry.key != own_key and not (entry.expires and entry.expires <= now) and entry.label not in exclude
    ]
    return tuple(deduplicate_neighbors(selected))


def deduplicate_neighbors(candidates: Iterable[tuple[LogEntry, float]]) -> list[Neighbor]:
    """Keep one neighbor per question: the one from the most trusted source."""
    by_key: dict[str, Neighbor] = {}
    for entry, similarity in candidates:
        earlier = by_key.get(entry.key)
        if earlier is None or entry.trust > earlier.weight:
            by_key[entry.key] = Neighbor(
                entry.question, entry.label, similarity, entry.outcome, entry.source, entry.trust
            )
    return list(by_key.values())


def draw_neighbors(
    ids: Sequence[int], k: int, seed: int, load_entries: Callable[[set[int]], dict[int, LogEntry]]
) -> tuple[Neighbor, ...]:
    """Draw k entries at random; the same ones for the same seed and ids."""
    order = [ids[index] for index in np.random.default_rng(seed).permutation(len(ids))]
    depth = k + EXTRA_CANDIDATES
    while True:
        entries = load_entries(set(order[:depth]))
        drawn = deduplicate_neighbors([(entries[number], 0.0) for number in order[:depth] if number in entries])[:k]
        if len(drawn) == k or depth >= len(order):
            return tuple(drawn)
        depth *= DEPTH_FACTOR
