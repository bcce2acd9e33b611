"""The history log in an SQLite file, with nearest-neighbor search in memory.

The table is the source of truth. Before each search, the index reads rows that any process added and drops rows that
any process deleted. The folder `FILE-lists`, where a large index is stored, may be deleted at any time. Each thread has
its own connection, in WAL mode.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import create_private_file, file_lock, sha256_text
from knowgate.core.stop_flag import check_stop_flag
from knowgate.core.validation import check_regular_file, expand_path
from knowgate.data.history.entries import (
    ENTRY_COLUMNS,
    INSERT_ENTRY,
    HistoryScope,
    KnowledgeLabel,
    LogEntry,
    entry_to_row,
    question_key,
)
from knowgate.data.history.store import IN_SCOPE, HistoryStore, deduplicate_neighbors
from knowgate.data.history.vector_index import LOCK_FILE, Hit, IndexLocation, VectorIndex, erase_rows
from knowgate.errors import ArtifactError, BadInput, KnowgateError, ModelError
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Neighbor, Vector

CHUNK_ROWS = 10_000  # rows read at a time
EXTRA_CANDIDATES = 8  # neighbors searched in addition to k, since some are filtered out
MAX_DEPTH = 2_000  # at most; reading more takes seconds, during which other questions wait
DEPTH_FACTOR = 4  # search this many times more if too many were filtered out
MAX_VECTOR_VALUE = 1e15  # unit vectors have no value above 1
LOG_FORMAT = 1
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL, question TEXT NOT NULL, label TEXT NOT NULL, outcome TEXT, source TEXT NOT NULL,
    weight REAL NOT NULL, model TEXT NOT NULL, prompts TEXT NOT NULL, tenant TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, vector BLOB NOT NULL,
    UNIQUE (tenant, model, prompts, key, source)
);
CREATE INDEX IF NOT EXISTS by_scope ON entries (tenant, model, prompts, id);
CREATE TRIGGER IF NOT EXISTS count_deletions AFTER DELETE ON entries BEGIN
    UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'deletions';
END;
INSERT OR IGNORE INTO meta VALUES ('deletions', '0'), ('stamp', hex(randomblob(16))), ('version', '{LOG_FORMAT}');
"""
DAMAGE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # raised by sqlite for damaged files
LOCK_TIMEOUT = 30.0  # seconds to wait for another writer
ERASE_SECONDS = 0.5  # to wait for readers before the write-ahead log is truncated
RETRY_SECONDS = 1.0  # between later attempts to truncate it
SMALL_FILE_BYTES = 64 << 20  # a file up to this size is rewritten within a second
log = logging.getLogger(__name__)


class SqliteDatabase:
    """Access to the SQLite file of a history log. The first use opens or creates the file."""

    def __init__(self, path: Path):
        self.path = path
        self._local = threading.local()

    def close(self) -> None:
        """Close the connection of this thread."""
        if hasattr(self._local, "connection"):
            self._local.connection.close()
            del self._local.connection

    def connection(self) -> sqlite3.Connection:
        """Return the connection of this thread, and open it on first use."""
        if not hasattr(self._local, "connection"):
            self._local.connection = self._open()
        connection: sqlite3.Connection = self._local.connection
        return connection

    def _open(self) -> sqlite3.Connection:
        """Open the file, create its folder and missing tables, and check the format version."""
        connection: sqlite3.Connection | None = None
        try:
            if self.path.exists():
                check_regular_file(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            create_private_file(self.path)  # the log contains questions
            connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT, isolation_level=None)
            _prepare(connection)
        except (*DAMAGE_ERRORS, OSError, BadInput) as error:
            if connection is not None:
                connection.close()
            raise explain_log_error(self.path, error) from None
        return connection

    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a query and return all rows."""
        try:
            return self.connection().execute(query, list(values)).fetchall()
        except DAMAGE_ERRORS as error:
            raise explain_log_error(self.path, error) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a write transaction in a `with` block. An exception rolls the transaction back."""
        connection = self.connection()
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            if isinstance(error, DAMAGE_ERRORS):
                raise explain_log_error(self.path, error) from None
            raise


def _prepare(connection: sqlite3.Connection) -> None:
    """Configure a new connection, create missing tables, and check the format version."""
    _check_schema(connection)
    _enable_wal(connection)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")  # deleted questions do not stay in free pages
    connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")  # others see all tables or none
    truncate_write_ahead_log(connection, wait_seconds=0)  # a process that has ended may have left deleted rows in it
    [[version]] = connection.execute("SELECT value FROM meta WHERE key = 'version'")
    if version != str(LOG_FORMAT):
        raise BadInput(f"the log has format {str(version)[:40]}, but this version of knowgate reads {LOG_FORMAT}")


def _enable_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode. SQLite does not wait for other connections here, so this function does."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # The lower eight bits of an error code say what kind of error it is.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def erase_deleted_rows(connection: sqlite3.Connection, path: Path, wait_seconds: float) -> bool:
    """Rewrite a file without its deleted rows, if it is small, and truncate its write-ahead log.

    SQLite overwrites deleted rows, but not the copies of rows that it leaves in unused parts of the file.

    Returns:
        Whether the write-ahead log was truncated. It is not if another connection reads the file for longer than
        `wait_seconds`.
    """
    try:
        if path.stat().st_size <= SMALL_FILE_BYTES:
            connection.execute("PRAGMA temp_store = MEMORY")  # no temporary file holds texts
            connection.execute("VACUUM")
        else:
            log.warning(
                "Unused parts of %s may hold copies of deleted rows. At a quiet time: sqlite3 FILE VACUUM", path
            )
    except (sqlite3.OperationalError, OSError) as error:  # locked, or the disk is full
        log.warning("Unused parts of %s may hold copies of rows deleted now, until others are deleted: %s", path, error)
    return truncate_write_ahead_log(connection, wait_seconds)


def truncate_write_ahead_log(connection: sqlite3.Connection, wait_seconds: float) -> bool:
    """Truncate the write-ahead log of a file, which may hold deleted rows.

    Returns:
        Whether that worked. It does not while another connection reads the file for longer than `wait_seconds`.
    """
    [(usual_wait,)] = connection.execute("PRAGMA busy_timeout")
    connection.execute(f"PRAGMA busy_timeout = {round(1_000 * wait_seconds)}")
    try:
        [(is_busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return not is_busy
    except sqlite3.OperationalError:  # locked
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {usual_wait}")


def _check_schema(connection: sqlite3.Connection) -> None:
    """Raise BadInput if the file is the database of another program."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    columns = {row[1] for row in connection.execute("PRAGMA table_info(entries)")}
    if tables and ("meta" not in tables or columns != ENTRY_COLUMNS):
        raise BadInput("the file is a database of another program")


def explain_log_error(path: Path, error: Exception) -> KnowgateError:
    """Convert an SQLite error to a readable one, such as a full disk or a damaged file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits hold an extended code
    cause = " ".join(str(error).split()).rstrip(".")  # sqlite quotes lines of a broken schema
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return KnowgateError(
            f"cannot write to the log {path}: {cause}. Earlier entries are saved. Free some disk space and run the same "
            "command again."
        )
    if code == sqlite3.SQLITE_BUSY:
        return KnowgateError(f"another process is writing to the log {path}. Wait until it ends, or stop it.")
    return ArtifactError(
        f"the log {path} cannot be used: {cause}. The file was not changed. Move it away or restore a backup."
    )


class SqliteHistory(HistoryStore):
    """A history log in an SQLite file: earlier questions, labeled as known or unknown.

    Args:
        path: The file.
        embedder: An embedding or its name (`minilm`, `mpnet`, `m3e`, a hub name, a folder, `openai:MODEL@URL`);
            None for the one that the log was filled with.
    """

    eraser_pauses = RETRY_SECONDS, RETRY_SECONDS
    vector_column = "vector"
    listed_id_condition = "id IN (SELECT value FROM json_each(?))"
    text_condition = "instr(lower(question), lower(?)) > 0"
    _database: SqliteDatabase

    def __init__(self, path: str | Path, embedder: str | Embedder | None = None):
        self.path = expand_path(path)
        super().__init__(SqliteDatabase(self.path), embedder)
        self._lock = threading.Lock()
        self._indexes: dict[HistoryScope, VectorIndex] = {}
        # The table's counter of deletions when the index of each scope was last updated.
        self._n_deletions: dict[HistoryScope, str | None] = {}
        self._index_folder = self.path.with_name(f"{self.path.name}-lists")

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, entries: Sequence[LogEntry], vectors: Vector) -> None:
        blobs = [np.asarray(vector, dtype=np.float32).tobytes() for vector in vectors]
        rows = [[*entry_to_row(entry), blob] for entry, blob in zip(entries, blobs, strict=True)]
        with self._database.transaction() as transaction:
            self._record_embedding(transaction)
            stored = transaction.execute("SELECT length(vector) FROM entries LIMIT 1").fetchone()
            # One vector of another length would make the log unusable.
            if any(len(blob) != (stored or [len(blobs[0])])[0] for blob in blobs):
                raise ModelError("the embedding model returned vectors of a new length. Check its server.")
            transaction.executemany(INSERT_ENTRY, rows)

    def _erase(self, ids: Sequence[int]) -> None:
        """Erase deleted rows from the files of the log, and their vectors from the stored index."""
        with self._erasing_lock:
            self._set_remains(not erase_deleted_rows(self._database.connection(), self.path, ERASE_SECONDS))
            if self._has_remains and self._start_eraser():
                log.warning("Deleted questions stay in %s-wal as long as another process reads the log.", self.path)
        if self._index_folder.is_dir():
            with file_lock(self._index_folder / LOCK_FILE):
                erase_rows(self._index_folder, ids)

    def _try_to_erase(self) -> bool:
        is_removed = not self.path.exists()  # a connection would create it again
        return is_removed or truncate_write_ahead_log(self._database.connection(), wait_seconds=0)

    def _erase_later(self) -> None:
        super()._erase_later()
        self._database.close()  # the connection of this thread

    # --- reading ----------------------------------------------------------------------------------

    def search(
        self, questions: Sequence[str], k: int, scope: HistoryScope, exclude: Collection[KnowledgeLabel] = ()
    ) -> list[tuple[Neighbor, ...]]:
        """Find the k most similar logged questions for each question.

        The search goes deeper until k usable entries are found among the MAX_DEPTH most similar ones.
        """
        check_k(k)
        if not self._database.read(f"SELECT 1 FROM entries WHERE {IN_SCOPE} LIMIT 1", self._scope_values(scope)):
            return [() for _ in questions]
        vectors = self.embed(questions)
        depth = k + EXTRA_CANDIDATES  # number of rows to search; some of them may be expired or excluded
        while True:
            check_stop_flag()
            with self._lock:
                index = self._update_index(scope)
                hits = index.nearest(vectors, depth)
            neighbors = [found[:k] for found in self._select_all_neighbors(questions, hits, exclude)]
            is_exhausted = depth >= min(len(index), MAX_DEPTH)
            if is_exhausted or all(len(found) == k for found in neighbors):
                return neighbors
            depth = min(depth * DEPTH_FACTOR, MAX_DEPTH)

    def _select_all_neighbors(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], exclude: Collection[KnowledgeLabel]
    ) -> list[tuple[Neighbor, ...]]:
        """Load the entries of all hits at once, and select the neighbors of each question."""
        entries = self._load_entries({row_id for question_hits in hits for row_id, _ in question_hits})
        pairs = zip(questions, hits, strict=True)
        return [_select_neighbors(question, question_hits, entries, exclude) for question, question_hits in pairs]

    # --- index ------------------------------------------------------------------------------------

    def _update_index(self, scope: HistoryScope) -> VectorIndex:
        """Return the vector index of a scope, after adding new rows and dropping deleted ones.

        Other processes may have changed the table.
        """
        n_deletions = self._read_meta("deletions")  # read before the rows, so that no later deletion is missed
        if scope not in self._indexes:
            self._indexes[scope] = self._create_index(scope)
            self._n_deletions[scope] = n_deletions
        index = self._indexes[scope]
        self._add_new_rows(index, scope)
        # The process that deletes a row also erases it from the index on disk, which has the ids up to `last_indexed_id`.
        # Only this process can drop deleted rows from its memory, which has the higher ids.
        if self._n_deletions[scope] != n_deletions:
            query = f"SELECT id FROM entries WHERE {IN_SCOPE} AND id > ?"
            rows = self._database.read(query, [*self._scope_values(scope), index.last_indexed_id])
            index.keep_in_memory({row[0] for row in rows})
            self._n_deletions[scope] = n_deletions
        return index

    def _add_new_rows(self, index: VectorIndex, scope: HistoryScope) -> None:
        """Add the rows of a scope that are newer than its index."""
        # New rows have higher ids than those in the index.
        query = f"SELECT id, vector FROM entries WHERE {IN_SCOPE} AND id > ? ORDER BY id LIMIT {CHUNK_ROWS}"
        values = self._scope_values(scope)
        while rows := self._database.read(query, [*values, index.last_id]):
            vectors = self._parse_vectors([row[1] for row in rows], index.width)
            index.add([row[0] for row in rows], vectors)

    def _create_index(self, scope: HistoryScope) -> VectorIndex:
        """Create the vector index of a scope, or open the stored one.

        The log and its index store the same random stamp. An index with another stamp is ignored.
        """
        width = len(self.embed(["width"])[0])  # vectors of all texts have the same length
        # The highest id that the log has ever used; the newest entry may have been deleted.
        newest = self._database.read("SELECT max(seq) FROM sqlite_sequence WHERE name = 'entries'", [])[0][0] or 0
        stamp = str(self._read_meta("stamp"))
        name = sha256_text(scope.tenant, scope.model, scope.prompts)[:16]
        index = VectorIndex(width, IndexLocation(self._index_folder, name, stamp))
        if index.last_indexed_id > newest:
            # The log was restored from a backup, so the stored index has rows that the log lacks. With another stamp, that
            # index is ignored, and an empty one is created.
            index = VectorIndex(width, IndexLocation(self._index_folder, name, f"{stamp} restored {newest}"))
        if index.last_indexed_id < 0:  # nothing is stored, so all rows will be loaded into memory
            index.reserve(self.count(scope))
        return index

    # --- rows -------------------------------------------------------------------------------------

    def _parse_vectors(self, blobs: Sequence[Any], width: int | None = None) -> Vector:
        """Parse stored vectors of equal length.

        Args:
            blobs: The stored values, four bytes per number.
            width: Expected length of a vector; None accepts any length.
        """
        if not blobs:
            return np.empty((0, 0), np.float32)
        sizes = {len(blob) if isinstance(blob, bytes) else 0 for blob in blobs}  # SQLite may hold other types
        size = max(sizes)  # in bytes
        if len(sizes) > 1 or size == 0 or size % 4 or width not in (None, size // 4):
            raise self._make_error("the vectors differ in length, or come from another embedding model")
        vectors = np.frombuffer(b"".join(blobs), dtype=np.float32).reshape(len(blobs), -1)
        if not float(np.abs(vectors).max()) < MAX_VECTOR_VALUE:
            raise self._make_error("the vectors contain NaN or infinite numbers")
        return vectors

    def _make_error(self, problem: str) -> Exception:
        return explain_log_error(self.path, BadInput(problem))


def _select_neighbors(
    question: str, hits: Sequence[Hit], entries: Mapping[int, LogEntry], exclude: Collection[KnowledgeLabel]
) -> tuple[Neighbor, ...]:
    """Convert the hits of a vector search to neighbors of a question.

    The question itself and unusable entries are left out.
    """
    own_key = question_key(question)
    now = time.time()
    candidates = []
    for row_id, similarity in hits:
        entry = entries.get(row_id)  # None if it was deleted since the search
        if entry is None or entry.key == own_key or entry.label in exclude:
            continue
        if entry.expires is None or entry.expires > now:
            candidates.append((entry, similarity))
    return tuple(deduplicate_neighbors(candidates))
