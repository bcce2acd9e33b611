"""The history log in an SQLite file, with nearest-neighbor search in memory.

The table is the source of truth. Before each search, the index reads rows that any process added and drops rows that
any process deleted. The folder `FILE-lists`, where a large index is stored, may be deleted at any time.
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
    LogEntry,
    entry_to_row,
)
from knowgate.data.history.similarity import (
    DEPTH_FACTOR,
    EXTRA_CANDIDATES,
    IN_SCOPE,
    LogEmbedder,
    SqlHistory,
    make_placeholders,
    select_neighbors,
)
from knowgate.data.history.sqlite_connection import SqliteDatabase, explain_log_error
from knowgate.data.history.vector_index import LOCK_FILE, Hit, IndexLocation, VectorIndex, erase_rows
from knowgate.errors import BadInput
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Neighbor, Vector

CHUNK_ROWS = 10_000  # rows read at a time
MAX_VARIABLES = 500  # placeholders in one SQL statement
MAX_VECTOR_VALUE = 1e15  # unit vectors have no value above 1


@dataclass
class _ScopeIndex:
    """The vector index of a scope (the entries of one model, prompts and tenant), and how current it is.

    Attributes:
        index: Vectors of the entries in the scope.
        last_id: Highest row id that was added to the index.
        deletions: Value of the table's deletion counter when the index was last updated.
    """

    index: VectorIndex
    last_id: int = 0
    deletions: int = 0


class SqliteHistory(SqlHistory):
    """A history log in an SQLite file: earlier questions, each with whether the LLM knew the answer.

    Args:
        path: The file.
        embedder: An embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder, `openai:MODEL@URL`);
            None for the one that the log was filled with.
    """

    vector_column = "vector"
    _database: SqliteDatabase

    def __init__(self, path: str | Path, embedder: str | Embedder | None = None):
        self.path = expand_path(path)
        self._database = SqliteDatabase(self.path)
        self._embedder = LogEmbedder(self._database, embedder)
        self._lock = threading.Lock()
        self._indexes: dict[HistoryScope, _ScopeIndex] = {}
        self._index_folder = self.path.with_name(f"{self.path.name}-lists")

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, entries: Sequence[LogEntry], vectors: Vector) -> None:
        rows = [entry_to_row(entry, vector) for entry, vector in zip(entries, vectors, strict=True)]
        with self._database.transaction() as transaction:
            self._embedder.register(transaction)
            transaction.executemany(INSERT_ENTRY, rows)

    def forget(self, *, ids: Sequence[int] = (), contains: str | None = None) -> int:
        """Delete entries by id or text, and erase them and their vectors from the files."""
        with self._database.transaction() as transaction:
            deleted: list[int] = []
            for chunk in _split_ids(ids):
                deleted += _delete(transaction, f"id IN ({make_placeholders(chunk)})", chunk)
            if contains:
                deleted += _delete(transaction, "instr(lower(question), lower(?)) > 0", [contains])
        return self._erase(deleted)

    def prune(self, *, now: float | None = None, keep_scope: HistoryScope | None = None) -> int:
        """Delete expired entries; with `keep_scope`, also the entries of the same tenant for other models or prompts."""
        with self._database.transaction() as transaction:
            deleted = _delete(transaction, "expires IS NOT NULL AND expires <= ?", [now or time.time()])
            if keep_scope is not None:
                values = [keep_scope.tenant, keep_scope.model, keep_scope.prompts]
                deleted += _delete(transaction, "tenant = ? AND NOT (model = ? AND prompts = ?)", values)
        return self._erase(deleted)

    def _erase(self, ids: Sequence[int]) -> int:
        """Erase deleted entries from the write-ahead log and their vectors from the index; return their number."""
        if ids:
            self._database.read("PRAGMA wal_checkpoint(TRUNCATE)", [])
        if ids and self._index_folder.is_dir():
            with file_lock(self._index_folder / LOCK_FILE):
                erase_rows(self._index_folder, ids)
        return len(ids)

    # --- reading ----------------------------------------------------------------------------------

    def entries(self, scope: HistoryScope | None = None, limit: int | None = None) -> Iterator[LogEntry]:
        """Yield entries, newest first."""
        where, values = (IN_SCOPE, self._scope_values(scope)) if scope is not None else ("1", [])
        query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE {where} ORDER BY id DESC LIMIT ?"
        for row in self._database.read(query, [*values, -1 if limit is None else limit]):
            yield self._parse_entry(row)

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k logged questions that are most similar to each question.

        The question itself, expired entries and entries with an excluded label are left out. So more than k entries
        (`depth`) are searched, and the search is repeated with more of them until k are left.
        """
        check_k(k)
        if not self._database.read(f"SELECT 1 FROM entries WHERE {IN_SCOPE} LIMIT 1", self._scope_values(scope)):
            return [() for _ in questions]
        vectors, depth = self._embedder.embed(questions), k + EXTRA_CANDIDATES
        while True:
            with self._lock:
                index = self._update_index(scope)
                hits = index.nearest(vectors, depth)
            entries = self._load_entries({row_id for question_hits in hits for row_id, _ in question_hits})
            neighbors = [
                select_neighbors(question, _drop_deleted(question_hits, entries), exclude)[:k]
                for question, question_hits in zip(questions, hits, strict=True)
            ]
            if depth >= len(index) or all(len(question_neighbors) == k for question_neighbors in neighbors):
                return neighbors
            depth *= DEPTH_FACTOR

    def close(self) -> None:
        """Close the connection of this thread."""
        self._database.close()

    # --- index ------------------------------------------------------------------------------------

    def _update_index(self, scope: HistoryScope) -> VectorIndex:
        """Bring the vector index of a scope up to date with the table, and return it.

        Other processes may have changed the table. Rows with higher ids than `last_id` are new and are added, in chunks.
        If the table's counter of deletions has changed, rows that no longer exist are dropped from memory. Rows in the
        stored index (up to `last_indexed_id`) need not be: whoever deletes a row erases it there.
        """
        deletions = self._count_deletions()
        state = self._indexes.get(scope)
        if state is None:
            index = self._create_index(scope)
            state = self._indexes.setdefault(scope, _ScopeIndex(index, index.last_indexed_id, deletions))
        values = self._scope_values(scope)
        query = f"SELECT id, vector FROM entries WHERE {IN_SCOPE} AND id > ? ORDER BY id LIMIT {CHUNK_ROWS}"
        while rows := self._database.read(query, [*values, state.last_id]):
            vectors = self._parse_vectors([row[1] for row in rows], state.index.width)
            state.index.add([row[0] for row in rows], vectors)
            state.last_id = rows[-1][0]
            if len(rows) < CHUNK_ROWS:
                break
        if deletions != state.deletions:
            query = f"SELECT id FROM entries WHERE {IN_SCOPE} AND id > ?"
            state.index.keep({row[0] for row in self._database.read(query, [*values, state.index.last_indexed_id])})
            state.deletions = deletions
        return state.index

    def _create_index(self, scope: HistoryScope) -> VectorIndex:
        """Create the index of a scope. A stored faiss index is used if it belongs to this log.

        The log and its index have the same random stamp, which tells whether they belong together.

        Without a stored index, memory is reserved for all rows at once, because growing arrays of 1.5 GB (a million
        rows) would copy them.
        """
        width = len(self._embedder.embed(["width"])[0])  # vectors of all texts have the same length
        newest = self._database.read("SELECT max(id) FROM entries", [])[0][0] or 0
        # With max, there is a row even if the file is damaged and has no stamp; then no stored index belongs to it.
        stamp = str(self._database.read("SELECT max(value) FROM meta WHERE key = 'stamp'", [])[0][0])
        name = sha256_text(scope.tenant, scope.model, scope.prompts)[:16]
        index = VectorIndex(width, location=IndexLocation(self._index_folder, name, stamp))
        if index.last_indexed_id > newest:  # the log was restored from a backup
            # The stored index has rows that are gone. A different stamp makes the new index ignore it.
            location = IndexLocation(self._index_folder, name, f"{stamp} restored {newest}")
            index = VectorIndex(width, location=location)
        if index.last_indexed_id < 0:
            index.reserve(self.count(scope))
        return index

    # --- rows -------------------------------------------------------------------------------------

    def _load_entries(self, ids: set[int]) -> dict[int, LogEntry]:
        entries: dict[int, LogEntry] = {}
        for chunk in _split_ids(sorted(ids)):
            query = f"SELECT {SELECTED_COLUMNS} FROM entries WHERE id IN ({make_placeholders(chunk)})"
            entries.update({row[0]: self._parse_entry(row) for row in self._database.read(query, chunk)})
        return entries

    def _parse_vectors(self, blobs: Sequence[Any], width: int | None = None) -> Vector:
        """Parse stored vectors, which must all have the same length.

        Args:
            blobs: The stored values, four bytes per number.
            width: Expected length of a vector; None accepts any length.
        """
        if not blobs:
            return np.empty((0, 0), np.float32)
        byte_counts = {len(blob) if isinstance(blob, bytes) else -1 for blob in blobs}  # -1: not a vector
        expected = 4 * width if width is not None else max(byte_counts)
        if byte_counts != {expected} or expected <= 0 or expected % 4:
            raise self._make_error("the vectors differ in length, or come from another embedding model")
        vectors = np.frombuffer(b"".join(blobs), dtype=np.float32).reshape(len(blobs), -1)
        if not float(np.abs(vectors).max()) < MAX_VECTOR_VALUE:
            raise self._make_error("the vectors contain NaN or infinite numbers")
        return vectors

    def _count_deletions(self) -> int:
        rows = self._database.read("SELECT value FROM meta WHERE key = 'deletions'", [])
        if not rows or not str(rows[0][0]).isdecimal() or len(str(rows[0][0])) > 18:
            raise self._make_error("the counter of deleted entries is missing or invalid")
        return int(rows[0][0])

    def _make_error(self, problem: str) -> Exception:
        return explain_log_error(self.path, BadInput(problem))


def _delete(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[int]:
    """Delete the rows that match a condition, and return their ids."""
    ids = [int(row[0]) for row in connection.execute(f"SELECT id FROM entries WHERE {where}", list(values))]
    connection.execute(f"DELETE FROM entries WHERE {where}", list(values))
    return ids


def _split_ids(ids: Sequence[int]) -> list[list[int]]:
    """Split ids into lists that fit one SQL statement."""
    return [list(ids[start : start + MAX_VARIABLES]) for start in range(0, len(ids), MAX_VARIABLES)]


def _drop_deleted(hits: Sequence[Hit], entries: dict[int, LogEntry]) -> Iterator[tuple[LogEntry, float]]:
    """Yield the entry and similarity of each hit; rows that were deleted since the search are skipped."""
    return ((entries[number], similarity) for number, similarity in hits if number in entries)
