"""The log in an SQLite file: WAL mode, safe under several processes; nearest questions by cosine.

The table is the truth. The index follows it: rows added by any process are read in before a search, rows deleted by
any process are dropped. What a large index keeps in a folder beside the file (`FILE-lists`) may be deleted at any time.
Knows vectors and rows; not what the labels are used for.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import file_lock, sha256_text
from knowgate.core.validation import expand_path
from knowgate.data.history.entries import (
    INSERT_ENTRY,
    SELECTED_COLUMNS,
    HistoryScope,
    KnowledgeLabel,
    LogEmbedding,
    LogEntry,
    RetrievalOutcome,
    entry_from_row,
    entry_to_row,
)
from knowgate.data.history.inverted_file import erase_rows
from knowgate.data.history.similarity import (
    DEPTH_FACTOR,
    EXTRA_CANDIDATES,
    LogEmbedder,
    draw_neighbors,
    select_neighbors,
)
from knowgate.data.history.sqlite_connection import SqliteDatabase, explain_log_error
from knowgate.data.history.vector_index import LOCK_FILE, Hit, IndexLocation, VectorIndex
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Embedder, Neighbor, Vector

CHUNK_ROWS = 10_000  # rows read at a time
NOT_EXPIRED = "(expires IS NULL OR expires > ?)"
MAX_VECTOR_VALUE = 1e15  # part of a vector; unit vectors have none above 1


@dataclass
class _Followed:
    """An index in memory and how far it has followed the table."""

    index: VectorIndex
    last: int = 0
    deletions: int = 0


class SqliteHistory:
    """A log in `path`. All entries of one file are embedded by one embedding, chosen by who fills it first.

    embedder: an embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder); None for the log's own.
    """

    def __init__(self, path: str | Path, embedder: str | Embedder | None = None):
        self.path = expand_path(path)
        self._db = SqliteDatabase(self.path)
        self._embedder = LogEmbedder(self._db, embedder)
        self._lock = threading.Lock()
        self._followed: dict[HistoryScope, _Followed] = {}
        self._lists = self.path.with_name(f"{self.path.name}-lists")

    # --- writing ----------------------------------------------------------------------------------

    def add(self, entries: Sequence[LogEntry], vectors: Vector | None = None) -> int:
        """Log entries; one that was logged before in the same scope by the same source is replaced."""
        if not entries:
            return 0
        if vectors is None:
            vectors = self._embedder.embed([entry.question for entry in entries])
        rows = [entry_to_row(entry, vector) for entry, vector in zip(entries, vectors, strict=True)]
        with self._db.transaction() as db:
            self._embedder.agree(db)
            db.executemany(INSERT_ENTRY, rows)
        return len(rows)

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries and their vectors, and wipe them from the file."""
        with self._db.transaction() as db:
            gone: list[int] = []
            for place in range(0, len(ids), 500):
                some = list(ids[place : place + 500])
                gone += _delete(db, f"id IN ({_marks(some)})", some)
            if contains:
                gone += _delete(db, "instr(lower(question), lower(?)) > 0", [contains])
        self._db.read("PRAGMA wal_checkpoint(TRUNCATE)", [])  # old pages leave the write-ahead file too
        self._wipe(gone)
        return len(gone)

    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int:
        """Delete what has expired, and, if a scope is given, what belongs to the same tenant's other models."""
        with self._db.transaction() as db:
            gone = _delete(db, "expires IS NOT NULL AND expires <= ?", [now or time.time()])
            if keep_scope is not None:
                kept = [keep_scope.tenant, keep_scope.model, keep_scope.prompts]
                gone += _delete(db, "tenant = ? AND NOT (model = ? AND prompts = ?)", kept)
        self._wipe(gone)
        return len(gone)

    def _wipe(self, gone: Sequence[int]) -> None:
        """Rows that are deleted leave the lists beside the log, too."""
        if gone and self._lists.is_dir():
            with file_lock(self._lists / LOCK_FILE):
                erase_rows(self._lists, gone)

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Newest first."""
        where, values = _where(scope)
        query = f"SELECT {SELECTED_COLUMNS} FROM entries{where} ORDER BY id DESC LIMIT ?"
        for row in self._db.read(query, [*values, -1 if limit is None else limit]):
            yield self._entry(row)

    def batches(self, size: int = 1000) -> Iterator[tuple[list[LogEntry], Vector]]:
        """All entries with their vectors, oldest first."""
        last, query = 0, f"SELECT {SELECTED_COLUMNS}, vector FROM entries WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self._db.read(query, [last, size]):
            last = rows[-1][0]
            yield [self._entry(row[:-1]) for row in rows], self._vectors([row[-1] for row in rows])

    @property
    def embedding(self) -> LogEmbedding:
        """What it was filled with."""
        return self._embedder.kept

    def compares_by(self, embedding: LogEmbedding) -> bool:
        """Whether vectors of that embedding are such as this log compares by."""
        return embedding.fingerprint == self._embedder.fingerprint

    def scopes(self) -> dict[HistoryScope, int]:
        """How many entries each scope has."""
        rows = self._db.read("SELECT model, prompts, tenant, count(*) FROM entries GROUP BY model, prompts, tenant", [])
        return {HistoryScope(model, prompts, tenant): count for model, prompts, tenant, count in rows}

    def ids_of(self, key: str) -> list[int]:
        """Entries of a question (see `question_key`), in any scope."""
        return [row[0] for row in self._db.read("SELECT id FROM entries WHERE key = ? ORDER BY id", [key])]

    def count(self, scope: HistoryScope) -> int:
        where, values = _where(scope)
        return int(self._db.read(f"SELECT count(*) FROM entries{where}", values)[0][0])

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, leave_out: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """The k most similar logged questions, most similar first; never the question itself, nothing expired."""
        if k < 1:
            raise BadSetting(f"k is {k}; at least 1 neighbour must be asked for.")
        where, values = _where(scope)
        if not self._db.read(f"SELECT 1 FROM entries{where} LIMIT 1", values):
            return [() for _ in questions]
        vectors, depth = self._embedder.embed(questions), k + EXTRA_CANDIDATES
        while True:
            with self._lock:
                index = self._follow(scope)
                hits = index.nearest(vectors, depth)
            found = self._by_id({number for row in hits for number, _ in row})
            near = [
                select_neighbors(asked, _present(row, found), leave_out)[:k]
                for asked, row in zip(questions, hits, strict=True)
            ]
            if depth >= len(index) or all(len(row) == k for row in near):
                return near
            depth *= DEPTH_FACTOR

    def embed(self, questions: Sequence[str]) -> Vector:
        """The vectors this log compares by."""
        return self._embedder.embed(questions)

    def outcomes(self, scope: HistoryScope) -> tuple[list[RetrievalOutcome], Vector]:
        """Every entry whose outcome is known and that has not expired, with its vector."""
        where, values = _where(scope)
        query = f"SELECT outcome, vector FROM entries{where} AND outcome IS NOT NULL AND {NOT_EXPIRED} ORDER BY id"
        rows = self._db.read(query, [*values, time.time()])
        if wrong := [row[0] for row in rows if row[0] not in list(RetrievalOutcome)]:
            raise self._broken(f"{str(wrong[0])[:40]!r} is no outcome")
        return [RetrievalOutcome(row[0]) for row in rows], self._vectors([row[1] for row in rows])

    def sample(
        self, k: int, scope: HistoryScope, seed: int = 0, leave_out: Collection[KnowledgeLabel] = ()
    ) -> tuple[Neighbor, ...]:
        """k questions at random, the same ones for a seed while the log does not change: DH-ICL's cold start."""
        where, values = _where(scope)
        query = f"SELECT id FROM entries{where} AND {NOT_EXPIRED} AND label NOT IN ({_marks(leave_out)}) ORDER BY id"
        ids = [row[0] for row in self._db.read(query, [*values, time.time(), *leave_out])]
        return draw_neighbors(ids, k, seed, self._by_id)

    def _follow(self, scope: HistoryScope) -> VectorIndex:
        """Bring the index in memory up to the table."""
        deletions = self._deletions()
        followed = self._followed.get(scope)
        if followed is None:
            index = self._new_index(scope)
            followed = self._followed.setdefault(scope, _Followed(index, index.listed, deletions))
        where, values = _where(scope)
        query = f"SELECT id, vector FROM entries{where} AND id > ? ORDER BY id LIMIT {CHUNK_ROWS}"
        while rows := self._db.read(query, [*values, followed.last]):
            block = self._vectors([row[1] for row in rows], followed.index.width)
            followed.index.add([row[0] for row in rows], block)
            followed.last = rows[-1][0]
            if len(rows) < CHUNK_ROWS:
                break
        if deletions != followed.deletions:
            fresh = self._db.read(f"SELECT id FROM entries{where} AND id > ?", [*values, followed.index.listed])
            followed.index.keep({row[0] for row in fresh})
            followed.deletions = deletions
        return followed.index

    def _new_index(self, scope: HistoryScope) -> VectorIndex:
        """Empty, or with the lists kept beside the log; those of another state of the log, a restored one, count for
        nothing. Room is made for all rows at once: a million of them are a gigabyte and a half."""
        width = len(self._embedder.embed(["width"])[0])
        newest = self._db.read("SELECT max(id) FROM entries", [])[0][0] or 0
        stamp = str(self._db.read("SELECT value FROM meta WHERE key = 'stamp'", [])[0][0])
        name = sha256_text(scope.tenant, scope.model, scope.prompts)[:16]
        index = VectorIndex(width, place=IndexLocation(self._lists, name, stamp))
        if index.listed > newest:
            index = VectorIndex(width, place=IndexLocation(self._lists, name, f"{stamp} restored {newest}"))
        if index.listed < 0:
            index.reserve(self.count(scope))
        return index

    def _by_id(self, ids: set[int]) -> dict[int, LogEntry]:
        found: dict[int, LogEntry] = {}
        numbers = sorted(ids)
        for place in range(0, len(numbers), 500):
            some = numbers[place : place + 500]
            rows = self._db.read(f"SELECT {SELECTED_COLUMNS} FROM entries WHERE id IN ({_marks(some)})", some)
            found.update({row[0]: self._entry(row) for row in rows})
        return found

    def _entry(self, row: Sequence[Any]) -> LogEntry:
        try:
            return entry_from_row(row)
        except BadInput as error:
            raise self._broken(str(error)) from None

    def _vectors(self, blobs: Sequence[Any], width: int | None = None) -> Vector:
        """Stored vectors, if all are of one width; width: the one they must have."""
        sizes = {len(blob) if isinstance(blob, bytes) else -1 for blob in blobs}
        if not blobs:
            return np.empty((0, 0), np.float32)
        wanted = 4 * width if width is not None else max(sizes)
        if sizes != {wanted} or wanted <= 0 or wanted % 4:
            raise self._broken("it holds vectors that are not of one width, or not of this embedding's")
        vectors = np.frombuffer(b"".join(blobs), dtype=np.float32).reshape(len(blobs), -1)
        if not float(np.abs(vectors).max()) < MAX_VECTOR_VALUE:
            raise self._broken("it holds vectors that are not numbers, or out of range")
        return vectors

    def _deletions(self) -> int:
        rows = self._db.read("SELECT value FROM meta WHERE key = 'deletions'", [])
        if not rows or not str(rows[0][0]).isdecimal() or len(str(rows[0][0])) > 18:
            raise self._broken("it does not say how many entries were deleted")
        return int(rows[0][0])

    def _broken(self, problem: str) -> Exception:
        return explain_log_error(self.path, BadInput(problem))

    def close(self) -> None:
        """Close this thread's connection."""
        self._db.close()


def _delete(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[int]:
    """Delete rows; gives their numbers."""
    gone = [int(row[0]) for row in db.execute(f"SELECT id FROM entries WHERE {where}", list(values))]
    db.execute(f"DELETE FROM entries WHERE {where}", list(values))
    return gone


def _marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))


def _where(scope: HistoryScope | None) -> tuple[str, list[Any]]:
    if scope is None:
        return " WHERE 1", []
    return " WHERE tenant = ? AND model = ? AND prompts = ?", [scope.tenant, scope.model, scope.prompts]


def _present(hits: Sequence[Hit], found: dict[int, LogEntry]) -> Iterator[tuple[LogEntry, float]]:
    """Rows that were deleted meanwhile are gone."""
    return ((found[number], similarity) for number, similarity in hits if number in found)
