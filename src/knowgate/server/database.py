"""Tables that server processes share: in an SQLite file, or in PostgreSQL if there are several machines.

The same SQL statements work on both. This module opens, reads, writes and vacuums tables, and deletes decisions.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from knowgate.core.files import create_private_file
from knowgate.core.postgres import TableSchema, open_postgres
from knowgate.core.postgres.address import is_postgres_address, parse_database_address, to_storable_text
from knowgate.core.validation import expand_path
from knowgate.data.history.sqlite_store import SMALL_FILE_BYTES, truncate_write_ahead_log
from knowgate.errors import ArtifactError, KnowgateError

if TYPE_CHECKING:
    from knowgate.core.postgres.database import PostgresDatabase

log = logging.getLogger(__name__)

WRITE_LOCK = "decisions"  # in a database, decisions are written and deleted by one process at a time
STORE_ERRORS = (sqlite3.Error, OSError, KnowgateError)  # raised while a store is unavailable
OPEN_ATTEMPTS = 50
OPEN_RETRY_SECONDS = 0.1
DECISION_TABLES = (
    "CREATE TABLE decisions (id TEXT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, question TEXT, record TEXT NOT NULL)",
    "CREATE INDEX decisions_at ON decisions (at)",
    "CREATE TABLE feedback (decision TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, rating TEXT NOT NULL, comment TEXT)",
    "CREATE INDEX feedback_of ON feedback (decision)",
    "CREATE TABLE audits (number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, decision TEXT NOT NULL, "
    "at DOUBLE PRECISION NOT NULL, arm TEXT NOT NULL, scope TEXT NOT NULL, kind TEXT NOT NULL, "
    "lost DOUBLE PRECISION, closed TEXT, opened TEXT)",
    "CREATE INDEX audits_of ON audits (decision)",
    "CREATE TABLE corrections (decision TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX corrections_of ON corrections (decision)",
    "CREATE TABLE figures (worker TEXT PRIMARY KEY, server TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, "
    "record TEXT NOT NULL)",
)
RATE_LIMIT_TABLES = (  # unused since version 2 of the counters; databases of earlier versions have it
    "CREATE TABLE used (key TEXT PRIMARY KEY, until DOUBLE PRECISION NOT NULL, day BIGINT NOT NULL, tokens BIGINT NOT NULL)",
)
SERVER_TABLES = (*DECISION_TABLES, *RATE_LIMIT_TABLES)
# Version 2 adds the owner of each row (the name of an API key), and an index that finds decisions by their question.
OWNER_COLUMNS = (
    "ALTER TABLE decisions ADD COLUMN owner TEXT",
    "ALTER TABLE decisions ADD COLUMN question_key TEXT",
    "CREATE INDEX decisions_of_question ON decisions (question_key)",
    "ALTER TABLE feedback ADD COLUMN owner TEXT",
    "CREATE INDEX feedback_by ON feedback (owner, at)",
    "ALTER TABLE audits ADD COLUMN owner TEXT",
)
# Version 3 records deletions, which other processes apply to decisions that they have not written yet.
DELETION_TABLES = (
    "CREATE TABLE deletions (at DOUBLE PRECISION NOT NULL, decision TEXT NOT NULL, question_key TEXT NOT NULL, owner TEXT)",
    "CREATE INDEX deletions_at ON deletions (at)",
)
# Version 4: hashes of the messages from which the question of a decision was made, if it is a follow-up.
SOURCE_QUESTION_TABLES = (
    "CREATE TABLE source_questions (decision TEXT NOT NULL, question_key TEXT NOT NULL)",
    "CREATE INDEX source_questions_by_key ON source_questions (question_key)",
    "CREATE INDEX source_questions_of ON source_questions (decision)",
)
# Version 5: whether the rows of earlier versions were upgraded, which reads all of them.
UPGRADE_TABLES = ("CREATE TABLE upgrades (at DOUBLE PRECISION NOT NULL)",)
# Version 2 of the counters: the number of requests of a key in each of the latest seconds.
REQUEST_TABLES = (
    "CREATE TABLE requests (key TEXT NOT NULL, second BIGINT NOT NULL, count BIGINT NOT NULL)",
    "CREATE UNIQUE INDEX requests_of ON requests (key, second)",
)
DECISION_MIGRATIONS = (DECISION_TABLES, OWNER_COLUMNS, DELETION_TABLES, SOURCE_QUESTION_TABLES, UPGRADE_TABLES)
RATE_LIMIT_MIGRATIONS = (RATE_LIMIT_TABLES, REQUEST_TABLES)
ADD_COLUMN = re.compile(r"ALTER TABLE (?P<table>\w+) ADD COLUMN (?P<column>\w+)")
CREATE_TABLE = re.compile(r"CREATE TABLE (?P<table>\w+) \((?P<columns>.*)\)$")
SERVER_MIGRATIONS = (
    SERVER_TABLES,
    OWNER_COLUMNS,
    (*DELETION_TABLES, *REQUEST_TABLES),
    SOURCE_QUESTION_TABLES,
    UPGRADE_TABLES,
)


def _list_columns(statements: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the columns of each table created or extended by the statements."""
    columns: defaultdict[str, set[str]] = defaultdict(set)
    for statement in statements:
        creation, addition = CREATE_TABLE.match(statement), ADD_COLUMN.match(statement)
        if creation is not None:
            definitions = creation["columns"].split(", ")  # such as "id TEXT PRIMARY KEY"
            columns[creation["table"]].update(definition.split()[0] for definition in definitions)
        elif addition is not None:
            columns[addition["table"]].add(addition["column"])
    return {table: frozenset(names) for table, names in columns.items()}


TRUNCATE_SECONDS = 0.1  # to wait for readers before the write-ahead log is truncated
VACUUM_SECONDS = 1  # to wait for other processes before deleted rows are erased; a later attempt follows
SERVER_SCHEMA = TableSchema("server", SERVER_MIGRATIONS, _list_columns(chain(*SERVER_MIGRATIONS)))


class Transaction(Protocol):
    """Interface of an open transaction. Its statements are committed together."""

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Any: ...
    def executemany(self, query: str, rows: Sequence[Sequence[Any]], /) -> Any: ...


class SqliteStore:
    """Tables in an SQLite file. Only the thread that opened the connection may use the store.

    Args:
        connection: The connection.
        path: The file.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path):
        self._connection = connection
        self._path, self._inode = path, path.stat().st_ino
        self._must_truncate = False  # whether deleted rows may remain in the write-ahead log

    def fetch_rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query, with values for its `?` parameters, and return all rows."""
        return self._connection.execute(query, _to_storable(values)).fetchall()

    @contextmanager
    def transaction(self, lock: str = "") -> Iterator[Transaction]:
        """Open a transaction. `lock` is ignored, because SQLite allows only one writer anyway.

        Raises:
            FileNotFoundError: The file was deleted or replaced, so what is written would be lost.
        """
        if not self._path.exists() or self._path.stat().st_ino != self._inode:
            raise FileNotFoundError(f"{self._path} was deleted or replaced. Restart the server to create a new one.")
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield _StorableTransaction(self._connection)
        if self._must_truncate:
            self._must_truncate = not truncate_write_ahead_log(self._connection, wait_seconds=0)

    def truncate_log(self) -> None:
        """Truncate the write-ahead log, so that no deleted rows remain in it.

        This is impossible while another process reads the file. Then each later transaction tries again.
        """
        self._must_truncate = not truncate_write_ahead_log(self._connection, TRUNCATE_SECONDS)

    def vacuum(self, tables: Sequence[str]) -> bool:
        """Erase deleted rows from the whole file, if it is small, and from the write-ahead log. `tables` is ignored.

        Returns:
            Whether no other attempt is needed. It is after a failure, such as a lock of another process or a full disk.
        """
        [(usual_wait,)] = self.fetch_rows("PRAGMA busy_timeout")
        self._connection.execute(f"PRAGMA busy_timeout = {1_000 * VACUUM_SECONDS}")
        is_rewritten = True
        try:
            if self._path.stat().st_size <= SMALL_FILE_BYTES:
                self._connection.execute("PRAGMA temp_store = MEMORY")  # no temporary file holds texts
                self._connection.execute("VACUUM")
            else:
                warning = "Unused parts of %s may hold copies of deleted rows. At a quiet time: sqlite3 FILE VACUUM"
                log.warning(warning, self._path)
        except (sqlite3.OperationalError, OSError) as error:
            log.warning("Unused parts of %s may hold copies of deleted rows for now: %s", self._path, error)
            is_rewritten = False
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {usual_wait}")
        self.truncate_log()
        return is_rewritten

    def close(self) -> None:
        self._connection.close()


class PostgresStore:
    """Tables in a PostgreSQL database. Parameters in statements are written as `?`, as in SQLite."""

    def __init__(self, database: PostgresDatabase):
        self._database = database

    def fetch_rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query, with values for its `?` parameters, and return all rows."""
        return self._database.read(query, _to_storable(values))

    @contextmanager
    def transaction(self, lock: str = "") -> Iterator[Transaction]:
        """Open a transaction. Transactions with the same `lock` run one at a time, in all processes."""
        with self._database.transaction(lock) as transaction:
            yield _StorableTransaction(transaction)

    def truncate_log(self) -> None:
        """Do nothing. PostgreSQL manages its write-ahead log itself."""

    def vacuum(self, tables: Sequence[str]) -> bool:
        """Run VACUUM on these tables, which removes deleted rows from the disk. Return whether that worked."""
        return self._database.vacuum(tables, log.warning, VACUUM_SECONDS)

    def close(self) -> None:
        """Do nothing. The connections are shared by the whole process, which closes them when it exits."""


Store = SqliteStore | PostgresStore


class _StorableTransaction:
    """Wrapper of a transaction. It replaces characters that a database cannot store, such as surrogates."""

    def __init__(self, transaction: Transaction):
        self._transaction = transaction

    def execute(self, query: str, values: Sequence[Any] = ()) -> Any:
        return self._transaction.execute(query, _to_storable(values))

    def executemany(self, query: str, rows: Sequence[Sequence[Any]]) -> Any:
        return self._transaction.executemany(query, [_to_storable(row) for row in rows])


def _to_storable(values: Sequence[Any]) -> list[Any]:
    """Replace characters in texts that a database cannot store. Other values stay as they are."""
    return [to_storable_text(value) if isinstance(value, str) else value for value in values]


def open_store(location: str, steps: Sequence[Sequence[str]], *, lock_timeout: float, is_durable: bool) -> Store:
    """Open the tables in an SQLite file or a PostgreSQL database. Create missing tables.

    Args:
        location: Path of an SQLite file, or address of a PostgreSQL database (postgresql://...).
        steps: CREATE and ALTER statements for an SQLite file, as in `TableSchema.steps`. They are not used for
            PostgreSQL, where all tables of the server are created.
        lock_timeout: Seconds to wait while another process writes to an SQLite file.
        is_durable: Whether commits to an SQLite file must survive a power failure. Otherwise they survive only the end
            of the process.
    """
    if not is_postgres_address(location):
        path = expand_path(location)
        return SqliteStore(_open_sqlite(path, steps, lock_timeout, is_durable), path)
    database = open_postgres(parse_database_address(location), SERVER_SCHEMA)
    database.read("SELECT 1 FROM decisions LIMIT 1")  # fail at startup rather than at the first request
    return PostgresStore(database)


def _open_sqlite(
    path: Path, steps: Sequence[Sequence[str]], lock_timeout: float, is_durable: bool
) -> sqlite3.Connection:
    """Open an SQLite file, and create or upgrade its tables. A locked file is tried OPEN_ATTEMPTS times.

    Args:
        path: The file.
        steps: SQL statements of each version of the tables.
        lock_timeout: Seconds to wait while another process writes.
        is_durable: Whether commits must survive a power failure.

    Raises:
        ArtifactError: A newer knowgate made the file.
    """
    create_private_file(path)
    for attempts_left in reversed(range(OPEN_ATTEMPTS)):
        connection = sqlite3.connect(path, timeout=lock_timeout)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted texts in free pages
            connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
            _upgrade_sqlite(connection, path, steps)
            return connection
        except (ArtifactError, sqlite3.Error) as error:
            connection.close()
            if not attempts_left or not is_locked(error):
                raise
            time.sleep(OPEN_RETRY_SECONDS)  # SQLite ignores the lock timeout while another process creates the file
    raise AssertionError("unreachable: the last attempt returns or raises")


def is_locked(error: BaseException | None) -> bool:
    """Return whether an SQLite file could not be used because another process writes to it."""
    # The lowest byte of an extended error code is the primary error code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _upgrade_sqlite(connection: sqlite3.Connection, path: Path, steps: Sequence[Sequence[str]]) -> None:
    """Create the tables of an SQLite file, or upgrade them. Old files are first copied to `NAME.backup-vN`.

    Args:
        connection: Connection to the file.
        path: The file.
        steps: SQL statements of each version, from version 1 to the latest. Running a step twice does no harm.
    """
    if _get_sqlite_version(connection, path, steps) == len(steps):
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")  # only one process upgrades; the others wait here
        version = _get_sqlite_version(connection, path, steps)
        if 0 < version < len(steps):
            _back_up(path, path.with_name(f"{path.name}.backup-v{version}"))
        if version < len(steps):  # otherwise another process has upgraded the file in the meantime
            for statements in steps:
                for statement in _list_missing(connection, statements):
                    connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(steps)}")


def _get_sqlite_version(connection: sqlite3.Connection, path: Path, steps: Sequence[Sequence[str]]) -> int:
    """Return the version of the tables. A new file has version 0. An old file without a version number has version 1.

    Raises:
        ArtifactError: The version is larger than the number of steps, so a newer knowgate made the file.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(steps):
        raise ArtifactError(
            f"the database {path} was made by a newer version of knowgate. It has format {version}, but this version reads at "
            f"most format {len(steps)}. Install the newer version, or restore a backup."
        )
    has_tables = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' LIMIT 1").fetchone()
    return version or (1 if has_tables else 0)


def _back_up(path: Path, copy: Path) -> None:
    """Copy an SQLite file as it was at its last commit, readable only by its owner."""
    create_private_file(copy)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def _list_missing(connection: sqlite3.Connection, statements: Sequence[str]) -> list[str]:
    """Translate statements to SQLite's dialect. Leave out additions of existing columns."""
    missing = []
    for statement in statements:
        addition = ADD_COLUMN.match(statement)
        if addition is not None:
            columns = connection.execute(f"PRAGMA table_info({addition['table']})").fetchall()
            column_names = {name for _, name, *_ in columns}
            if addition["column"] in column_names:
                continue
        missing.append(_to_sqlite(statement))
    return missing


def _to_sqlite(statement: str) -> str:
    """Translate a CREATE statement from PostgreSQL to SQLite.

    Example: CREATE TABLE t becomes CREATE TABLE IF NOT EXISTS t.
    """
    statement = statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS")
    statement = re.sub(r"^CREATE( UNIQUE)? INDEX", r"CREATE\1 INDEX IF NOT EXISTS", statement)
    number_type = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
    return statement.replace(number_type, "INTEGER PRIMARY KEY AUTOINCREMENT").replace("DOUBLE PRECISION", "REAL")
