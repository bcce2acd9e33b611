"""Code that the SQLite and PostgreSQL history logs share: embedding, common queries, and selection of neighbors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from knowgate.data.history.entries import (
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LogEmbedding,
    LogEntry,
    RetrievalOutcome,
    entry_from_row,
    question_key,
)
from knowgate.errors import BadInput, BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, RemoteEmbedder, SentenceEmbedder, load_embedder
from knowgate.types import Embedder, Neighbor, Vector

NAME_KEY, FINGERPRINT_KEY = "embedder_name", "embedder"  # keys in the table `meta`; older logs have no name
EXTRA_CANDIDATES = 8  # neighbors fetched in addition to k, since some are filtered out
DEPTH_FACTOR = 4  # fetch this many times more if too many were filtered out
NOT_EXPIRED = "(expires IS NULL OR expires > ?)"
IN_SCOPE = "tenant = ? AND model = ? AND prompts = ?"
SELECT_META = "SELECT value FROM meta WHERE key = ?"
INSERT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING"


class MetaReader(Protocol):
    """A database (an SQLite file or PostgreSQL) that runs read queries."""

    @property
    def path(self) -> Path | str: ...
    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...


class WriteTransaction(Protocol):
    """A write transaction, in which SQL statements can be executed."""

    def execute(self, query: str, values: Sequence[Any], /) -> Any: ...


class LogEmbedder:
    """The sentence embedding of a log. It is recorded in the log when the first entry is added.

    Args:
        database: Database of the log.
        embedder: An embedding or its name; None for the one of the log ('minilm' for a new log).
    """

    def __init__(self, database: MetaReader, embedder: str | Embedder | None = None):
        self._database = database
        self._given = embedder
        self._is_checked = False

    def embed(self, texts: Sequence[str]) -> Vector:
        """Embed texts; raise BadSetting if the vectors of the log were made by another embedding model."""
        if not self._is_checked:
            self._check(self._read_meta(FINGERPRINT_KEY))
        return self._embedder.embed(list(texts))

    def register(self, transaction: WriteTransaction) -> None:
        """Record the embedding in the log, unless one is recorded; raises BadSetting if that one differs."""
        # INSERT_META does nothing if the key exists.
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
            return load_embedder(self._given or self._read_meta(NAME_KEY) or DEFAULT_EMBEDDER)
        return self._given

    @property
    def _name(self) -> str:
        """Name under which the embedding can be loaded; "" for an embedding object."""
        return self._embedder.spec if isinstance(self._embedder, SentenceEmbedder | RemoteEmbedder) else ""

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
            f"the log {path} contains vectors of another embedding model ({filled_with}). They cannot be compared "
            f"with those of '{self._name or fingerprint[:12]}'. {advice}, or convert the log to this `embedder`: "
            f"knowgate history copy {path} NEW.db"
        )


class SqlHistory:
    """Base class of history stores: everything that SQLite and PostgreSQL do with the same SQL.

    Attributes:
        vector_column: SQL expression that reads a vector.
    """

    vector_column: ClassVar[str]
    _database: MetaReader
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

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int:
        """Add entries; earlier ones of the same question, scope and source are replaced."""
        if not entries:
            return 0
        if vectors is None:
            vectors = self._embedder.embed([entry.question for entry in entries])
        self._write(entries, vectors)
        return len(entries)

    def _write(self, entries: Sequence[LogEntry], vectors: Vector) -> None:
        raise NotImplementedError

    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]:
        """Yield all entries with their vectors in batches of at most `size`, oldest first."""
        last, columns = 0, f"{SELECTED_COLUMNS}, {self.vector_column}"
        while rows := self._read(f"SELECT {columns} FROM entries WHERE id > ? ORDER BY id LIMIT ?", [last, size]):
            last = rows[-1][0]
            yield [self._parse_entry(row[:-1]) for row in rows], self._parse_vectors([row[-1] for row in rows])

    def scopes(self) -> dict[HistoryScope, int]:
        """Return the number of entries of each scope."""
        rows = self._read("SELECT model, prompts, tenant, count(*) FROM entries GROUP BY model, prompts, tenant", [])
        return {HistoryScope(model, prompts, tenant): count for model, prompts, tenant, count in rows}

    def find_ids(self, key: str) -> list[int]:
        """Return the ids of a question in all scopes, by its `question_key`."""
        return [row[0] for row in self._read("SELECT id FROM entries WHERE key = ? ORDER BY id", [key])]

    def count(self, scope: HistoryScope) -> int:
        """Return the number of entries of a scope."""
        return int(self._read(f"SELECT count(*) FROM entries WHERE {IN_SCOPE}", self._scope_values(scope))[0][0])

    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]:
        """Return how retrieval changed the answers in a scope, with the vectors of the questions.

        Entries without outcome and expired entries are left out.
        """
        where = f"{IN_SCOPE} AND outcome IS NOT NULL AND {NOT_EXPIRED}"
        query = f"SELECT outcome, {self.vector_column} FROM entries WHERE {where} ORDER BY id"
        rows = self._read(query, [*self._scope_values(scope), time.time()])
        if invalid := [row[0] for row in rows if row[0] not in list(RetrievalOutcome)]:
            raise self._make_error(f"an outcome is {str(invalid[0])[:40]!r} instead of better, worse or same")
        return [RetrievalOutcome(row[0]) for row in rows], self._parse_vectors([row[1] for row in rows])

    def sample(
        self, k: int, scope: HistoryScope, seed: int = 0, exclude: Collection[KnowledgeLabel] = ()
    ) -> tuple[Neighbor, ...]:
        """Draw k logged questions of a scope at random, for use without similar questions (cold start).

        Expired entries and entries with an excluded label are left out. The same seed draws the same questions as long
        as the log does not change.
        """
        labels = [str(label) for label in exclude] or [""]  # SQL does not allow an empty list
        where = f"{IN_SCOPE} AND {NOT_EXPIRED} AND label NOT IN ({make_placeholders(labels)})"
        query = f"SELECT id FROM entries WHERE {where} ORDER BY id"
        ids = [row[0] for row in self._read(query, [*self._scope_values(scope), time.time(), *labels])]
        return draw_neighbors(ids, k, seed, self._load_entries)

    def _read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._database.read(query, values)

    def _parse_entry(self, row: Sequence[Any]) -> LogEntry:
        try:
            return entry_from_row(row)
        except BadInput as error:
            raise self._make_error(str(error)) from None

    def _scope_values(self, scope: HistoryScope) -> list[str]:
        return [scope.tenant, scope.model, scope.prompts]

    def _load_entries(self, ids: set[int]) -> dict[int, LogEntry]:
        raise NotImplementedError

    def _parse_vectors(self, values: Sequence[Any]) -> Vector:
        raise NotImplementedError

    def _make_error(self, problem: str) -> Exception:
        raise NotImplementedError


def make_placeholders(values: Collection[Any]) -> str:
    """Return SQL placeholders for a list of values, such as '?, ?' for two."""
    return ", ".join("?" * len(values))


# --- neighbors ------------------------------------------------------------------------------------


def select_neighbors(
    question: str, candidates: Iterable[tuple[LogEntry, float]], exclude: Collection[KnowledgeLabel]
) -> tuple[Neighbor, ...]:
    """Select the candidates that may serve as neighbors of a question, in their order.

    The question itself, expired entries, excluded labels and duplicates of a question are dropped.
    """
    own_key, now = question_key(question), time.time()
    selected = []
    for entry, similarity in candidates:
        is_expired = bool(entry.expires and entry.expires <= now)
        if entry.key != own_key and not is_expired and entry.label not in exclude:
            selected.append((entry, similarity))
    return tuple(deduplicate_neighbors(selected))


def deduplicate_neighbors(candidates: Iterable[tuple[LogEntry, float]]) -> list[Neighbor]:
    """Keep one neighbor per question: the entry whose label is trusted most."""
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
    """Draw k entries at random; the same seed and ids give the same entries.

    Args:
        ids: Row ids to draw from.
        k: Number of entries; fewer are returned if there are not enough different questions.
        seed: Random seed.
        load_entries: Loads entries by row id; deleted ones may be missing.
    """
    shuffled = [ids[index] for index in np.random.default_rng(seed).permutation(len(ids))]
    depth = k + EXTRA_CANDIDATES
    while True:
        # More than k entries are loaded, because several of them may be about the same question.
        entries = load_entries(set(shuffled[:depth]))
        candidates = [(entries[row_id], 0.0) for row_id in shuffled[:depth] if row_id in entries]
        drawn = deduplicate_neighbors(candidates)[:k]
        if len(drawn) == k or depth >= len(shuffled):
            return tuple(drawn)
        depth *= DEPTH_FACTOR
