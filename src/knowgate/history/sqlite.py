"""The log in an SQLite file: WAL mode, safe under several processes; nearest questions by cosine.

The table is the truth. The index in memory follows it: rows added by any process are read in before a search, rows
deleted by any process are dropped. Knows vectors and rows; not what the labels are used for.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.embedding import SentenceEmbedder
from knowgate.errors import BadSetting
from knowgate.history.database import Database
from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source, question_key
from knowgate.history.index import VectorIndex
from knowgate.types import Embedder, Neighbour, Vector

COLUMNS = "id, question, label, outcome, source, weight, model, prompts, tenant, created, expires"
# an update keeps the row's number, so an index that has it need not hear of it: labels are read at search
INSERT = """INSERT INTO entries
    (key, question, label, outcome, source, weight, model, prompts, tenant, created, expires, vector)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, model, prompts, key, source) DO UPDATE SET
    label = excluded.label, outcome = excluded.outcome, weight = excluded.weight,
    created = excluded.created, expires = excluded.expires"""
EXTRA = 8  # neighbours fetched beyond k, for those that fall away (the question itself, expired ones)


@dataclass
class _Followed:
    """An index in memory and how far it has followed the table."""

    index: VectorIndex
    last: int = 0
    deletions: int = 0


class SqliteHistory:
    """A log in `path`. All entries of one file are embedded by one embedding, named at its first use."""

    def __init__(self, path: str | Path, embedder: Embedder | None = None):
        self.path = Path(path).expanduser()
        self._embedder = embedder or SentenceEmbedder()
        self._db = Database(self.path)
        self._lock = threading.Lock()
        self._followed: dict[Scope, _Followed] = {}

    # --- writing ----------------------------------------------------------------------------------

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int:
        """Log entries; one that was logged before in the same scope by the same source is replaced."""
        if not entries:
            return 0
        if vectors is None:
            vectors = self._embedder.embed([entry.question for entry in entries])
        rows = [_to_row(entry, vector) for entry, vector in zip(entries, vectors, strict=True)]
        with self._db.transaction() as db:
            self._check_embedder(db)
            db.executemany(INSERT, rows)
        return len(rows)

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries and their vectors, and wipe them from the file."""
        with self._db.transaction() as db:
            count = 0
            for place in range(0, len(ids), 500):
                some = list(ids[place : place + 500])
                count += db.execute(f"DELETE FROM entries WHERE id IN ({_marks(some)})", some).rowcount
            if contains:
                count += db.execute(
                    "DELETE FROM entries WHERE instr(lower(question), lower(?)) > 0", [contains]
                ).rowcount
        self._db.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")  # old pages leave the write-ahead file too
        return count

    def prune(self, *, now: float | None = None, keep_scope: Scope | None = None) -> int:
        """Delete what has expired, and, if a scope is given, what belongs to the same tenant's other models."""
        with self._db.transaction() as db:
            count = db.execute(
                "DELETE FROM entries WHERE expires IS NOT NULL AND expires <= ?", [now or time.time()]
            ).rowcount
            if keep_scope is not None:
                kept = [keep_scope.tenant, keep_scope.model, keep_scope.prompts]
                count += db.execute(
                    "DELETE FROM entries WHERE tenant = ? AND NOT (model = ? AND prompts = ?)", kept
                ).rowcount
        return count

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: Scope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Newest first."""
        where, values = _where(scope)
        query = f"SELECT {COLUMNS} FROM entries{where} ORDER BY id DESC LIMIT ?"
        for row in self._db.read(query, [*values, -1 if limit is None else limit]):
            yield _from_row(row)

    def scopes(self) -> dict[Scope, int]:
        """How many entries each scope has."""
        rows = self._db.read("SELECT model, prompts, tenant, count(*) FROM entries GROUP BY model, prompts, tenant", [])
        return {Scope(model, prompts, tenant): count for model, prompts, tenant, count in rows}

    def count(self, scope: Scope) -> int:
        where, values = _where(scope)
        return int(self._db.read(f"SELECT count(*) FROM entries{where}", values)[0][0])

    def search(self, questions: Sequence[str], k: int, scope: Scope) -> list[tuple[Neighbour, ...]]:
        """The k most similar logged questions, most similar first; never the question itself, nothing expired."""
        if k < 1:
            raise BadSetting(f"k is {k}; at least 1 neighbour must be asked for.")
        if not self.count(scope):
            return [() for _ in questions]
        vectors = self._embedder.embed(list(questions))
        with self._lock:
            index = self._follow(scope)
            hits = index.nearest(vectors, k + EXTRA)
        found = self._by_id({number for row in hits for number, _ in row})
        return [self._neighbours(question, row, found, k) for question, row in zip(questions, hits, strict=True)]

    def embed(self, questions: Sequence[str]) -> Vector:
        """The vectors this log compares by."""
        return self._embedder.embed(list(questions))

    def outcomes(self, scope: Scope) -> tuple[list[Outcome], Vector]:
        """Every entry whose outcome is known and that has not expired, with its vector."""
        where, values = _where(scope)
        counts = "outcome IS NOT NULL AND (expires IS NULL OR expires > ?)"
        query = f"SELECT outcome, vector FROM entries{where} AND {counts} ORDER BY id"
        rows = self._db.read(query, [*values, time.time()])
        vectors = np.frombuffer(b"".join(row[1] for row in rows), dtype=np.float32)
        return [Outcome(row[0]) for row in rows], vectors.reshape(len(rows), -1) if rows else np.empty(
            (0, 0), np.float32
        )

    def sample(self, k: int, scope: Scope, seed: int = 0) -> tuple[Neighbour, ...]:
        """k entries at random, the same ones for a seed while the log does not change: DH-ICL's cold start."""
        where, values = _where(scope)
        ids = [row[0] for row in self._db.read(f"SELECT id FROM entries{where} ORDER BY id", values)]
        chosen = np.random.default_rng(seed).permutation(len(ids))[:k]
        found = self._by_id({ids[place] for place in chosen})
        return tuple(_neighbour(found[ids[place]], 0.0) for place in chosen if ids[place] in found)

    def _neighbours(
        self, question: str, hits: Sequence[tuple[int, float]], found: dict[int, LogEntry], k: int
    ) -> tuple[Neighbour, ...]:
        own, now = question_key(question), time.time()
        kept: dict[str, Neighbour] = {}
        for number, similarity in hits:
            entry = found.get(number)
            if entry is None or entry.key == own or (entry.expires and entry.expires <= now):
                continue
            rival = kept.get(entry.key)  # the same question by two sources counts once: the more trusted one
            if rival is None or entry.trust > rival.weight:
                kept[entry.key] = _neighbour(entry, similarity)
        return tuple(list(kept.values())[:k])

    def _follow(self, scope: Scope) -> VectorIndex:
        """Bring the index in memory up to the table."""
        deletions = int(self._db.read("SELECT value FROM meta WHERE key = 'deletions'", [])[0][0])
        followed = self._followed.get(scope)
        if followed is None:
            width = len(self._embedder.embed(["width"])[0])
            followed = self._followed.setdefault(scope, _Followed(VectorIndex(width), deletions=deletions))
        where, values = _where(scope)
        rows = self._db.read(f"SELECT id, vector FROM entries{where} AND id > ? ORDER BY id", [*values, followed.last])
        if rows:
            block = np.frombuffer(b"".join(row[1] for row in rows), dtype=np.float32).reshape(len(rows), -1)
            followed.index.add([row[0] for row in rows], block)
            followed.last = rows[-1][0]
        if deletions != followed.deletions:
            followed.index.keep({row[0] for row in self._db.read(f"SELECT id FROM entries{where}", values)})
            followed.deletions = deletions
        return followed.index

    def _by_id(self, ids: set[int]) -> dict[int, LogEntry]:
        found: dict[int, LogEntry] = {}
        numbers = sorted(ids)
        for place in range(0, len(numbers), 500):
            some = numbers[place : place + 500]
            rows = self._db.read(f"SELECT {COLUMNS} FROM entries WHERE id IN ({_marks(some)})", some)
            found.update({row[0]: _from_row(row) for row in rows})
        return found

    def close(self) -> None:
        """Close this thread's connection."""
        self._db.close()

    def _check_embedder(self, db: sqlite3.Connection) -> None:
        mine = self._embedder.fingerprint
        db.execute("INSERT OR IGNORE INTO meta VALUES ('embedder', ?)", [mine])
        there = db.execute("SELECT value FROM meta WHERE key = 'embedder'").fetchone()[0]
        if there != mine:
            raise BadSetting(
                f"the log {self.path} holds vectors of another embedding ({there[:12]}, this one is {mine[:12]}). "
                "Use that embedding, or export the log and import it into a new file."
            )


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _where(scope: Scope | None) -> tuple[str, list[Any]]:
    if scope is None:
        return " WHERE 1", []
    return " WHERE tenant = ? AND model = ? AND prompts = ?", [scope.tenant, scope.model, scope.prompts]


def _to_row(entry: LogEntry, vector: Vector) -> tuple[Any, ...]:
    scope = entry.scope
    blob = np.asarray(vector, dtype=np.float32).tobytes()
    return (
        entry.key, entry.question, entry.label, entry.outcome, entry.source, entry.trust,
        scope.model, scope.prompts, scope.tenant, entry.created, entry.expires, blob,
    )  # fmt: skip


def _from_row(row: Sequence[Any]) -> LogEntry:
    number, question, label, outcome, source, weight, model, prompts, tenant, created, expires = row
    scope = Scope(model, prompts, tenant)
    entry = LogEntry(question, Known(label), scope, Source(source), Outcome(outcome) if outcome else None, weight)
    return replace(entry, created=created, expires=expires, id=number)


def _neighbour(entry: LogEntry, similarity: float) -> Neighbour:
    return Neighbour(entry.question, entry.label, similarity, entry.outcome, entry.source, entry.trust)
