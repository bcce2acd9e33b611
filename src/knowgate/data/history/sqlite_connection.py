"""SQLite access for the history log: WAL mode, one connection per thread, and readable errors."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from knowgate.core.files import create_private_file
from knowgate.core.validation import check_regular_file
from knowgate.data.history.entries import COLUMNS
from knowgate.errors import ArtifactError, BadInput, KnowgateError

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
ENTRY_COLUMNS = frozenset({*COLUMNS, "key", "vector"})
DAMAGE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # raised by sqlite for damaged files
LOCK_TIMEOUT = 30.0  # seconds to wait for another writer


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
