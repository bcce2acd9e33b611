"""An SQLite file that several workers use (WAL). Knows how one is opened; not what is in it."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from knowgate.core.postgres import TableSchema, open_postgres
from knowgate.core.postgres.address import is_postgres_address, parse_database_address, to_storable_text
from knowgate.core.validation import expand_path
from knowgate.errors import KnowgateError

if TYPE_CHECKING:
    from knowgate.core.postgres.database import PostgresDatabase


OPEN_ATTEMPTS = 50
OPEN_RETRY_SECONDS = 0.1  # seconds


def open_sqlite(path: Path, schema: str, *, seconds: float, safe: bool) -> sqlite3.Connection:
    """seconds: for another one's turn. safe: what was written survives a power cut, too, not only a killed process."""
    for left in reversed(range(OPEN_ATTEMPTS)):
        file = sqlite3.connect(path, timeout=seconds)
        try:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA secure_delete = ON")  # what is forgotten does not linger in free pages
            file.execute(f"PRAGMA synchronous = {'FULL' if safe else 'NORMAL'}")
            file.executescript(schema)
            return file
        except sqlite3.Error as error:
            file.close()
            if not left or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(OPEN_RETRY_SECONDS)  # nobody waits for his turn to make a file new, whatever the time given
    raise AssertionError("one of the tries was the last")


STORE_ERRORS = (sqlite3.Error, OSError, KnowgateError)  # what a store raises that cannot be used now
MIGRATIONS = (
    (
        "CREATE TABLE decisions (id TEXT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, question TEXT, "
        "record TEXT NOT NULL)",
        "CREATE INDEX decisions_at ON decisions (at)",
        "CREATE TABLE feedback (decision TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, rating TEXT NOT NULL, "
        "comment TEXT)",
        "CREATE INDEX feedback_of ON feedback (decision)",
        "CREATE TABLE audits (number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, decision TEXT NOT NULL, "
        "at DOUBLE PRECISION NOT NULL, arm TEXT NOT NULL, scope TEXT NOT NULL, kind TEXT NOT NULL, "
        "lost DOUBLE PRECISION, closed TEXT, opened TEXT)",
        "CREATE INDEX audits_of ON audits (decision)",
        "CREATE TABLE corrections (decision TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, answer TEXT NOT NULL)",
        "CREATE INDEX corrections_of ON corrections (decision)",
        "CREATE TABLE used (key TEXT PRIMARY KEY, until DOUBLE PRECISION NOT NULL, day BIGINT NOT NULL, "
        "tokens BIGINT NOT NULL)",
        "CREATE TABLE figures (worker TEXT PRIMARY KEY, server TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, "
        "record TEXT NOT NULL)",
    ),
)
TABLE_COLUMNS = {
    "decisions": frozenset({"id", "at", "question", "record"}),
    "feedback": frozenset({"decision", "at", "rating", "comment"}),
    "audits": frozenset({"number", "decision", "at", "arm", "scope", "kind", "lost", "closed", "opened"}),
    "corrections": frozenset({"decision", "at", "answer"}),
    "used": frozenset({"key", "until", "day", "tokens"}),
    "figures": frozenset({"worker", "server", "at", "record"}),
}
SERVER_SCHEMA = TableSchema("server", MIGRATIONS, TABLE_COLUMNS)
log = logging.getLogger(__name__)


class Transaction(Protocol):
    """A transaction."""

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Any: ...
    def executemany(self, query: str, rows: Sequence[Sequence[Any]], /) -> Any: ...


class Store(Protocol):
    """turn: of those who write under the same name, in any process, one after the other."""

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    def writing(self, turn: str = "") -> AbstractContextManager[Transaction]: ...
    def wipe(self, tables: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class SqliteStore:
    """A file. Used by the thread that opened it."""

    def __init__(self, file: sqlite3.Connection):
        self._file = file

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._file.execute(query, list(values)).fetchall()

    @contextmanager
    def writing(self, turn: str = "") -> Iterator[Transaction]:
        """Writers of a file go one after the other anyway."""
        with self._file:
            self._file.execute("BEGIN IMMEDIATE")
            yield self._file

    def wipe(self, tables: Sequence[str]) -> None:
        """What was deleted leaves the write-ahead file, too."""
        self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._file.close()


class PostgresStore:
    """A schema of a database."""

    def __init__(self, database: PostgresDatabase):
        self._database = database

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._database.read(query, _storable(values))

    @contextmanager
    def writing(self, turn: str = "") -> Iterator[Transaction]:
        with self._database.transaction(turn) as transaction:
            yield _Storing(transaction)

    def wipe(self, tables: Sequence[str]) -> None:
        self._database.sweep(tables, log.warning)

    def close(self) -> None:
        """The connections are the process's, who ends them."""


class _Storing:
    """Texts become such as the database can hold."""

    def __init__(self, inner: Transaction):
        self._inner = inner

    def execute(self, query: str, values: Sequence[Any] = ()) -> Any:
        return self._inner.execute(query, _storable(values))

    def executemany(self, query: str, rows: Sequence[Sequence[Any]]) -> Any:
        return self._inner.executemany(query, [_storable(row) for row in rows])


def _storable(values: Sequence[Any]) -> list[Any]:
    return [to_storable_text(value) if isinstance(value, str) else value for value in values]


def open_store(where: str, schema: str, *, seconds: float, safe: bool) -> Store:
    """where: a file or postgresql://... schema: of a file. seconds, safe: see `open_shared`."""
    if not is_postgres_address(where):
        return SqliteStore(open_sqlite(expand_path(where), schema, seconds=seconds, safe=safe))
    database = open_postgres(parse_database_address(where), SERVER_SCHEMA)
    database.read("SELECT 1 FROM decisions LIMIT 1")  # what cannot be used is said at once
    return PostgresStore(database)
