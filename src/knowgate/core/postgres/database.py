"""A PostgreSQL database with a connection pool. Its tables are created or upgraded before the first use.

Statements use question marks for parameters, as in SQLite, so that both databases can share them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from knowgate.core.postgres import Settings, TableSchema, migrations
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.core.postgres.migrations import Connection
from knowgate.errors import KnowgateError

Result = TypeVar("Result")
MAX_CONNECTIONS = 8
CONNECT_TIMEOUT = 10.0  # seconds to open a connection or to get one from the pool
MAX_IDLE_SECONDS = 120.0
MAX_TRANSACTION_TRIES = 5
# Beginnings of the error codes (SQLSTATE) of a lost connection, and of a server that stops or starts.
LOST_CONNECTION_STATES = ("08", "57P0")
SMALL_TABLE_BYTES = 64 << 20  # a table up to this size can be rewritten within seconds
VACUUM_LOCK_SECONDS = 5
# A host that no longer answers is noticed after 30 to 35 seconds. Where the system does not support them, libpq ignores
# these options.
KEEPALIVE_OPTIONS = {
    "keepalives_idle": "20",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",  # milliseconds
}
RETRYABLE_ERRORS = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
DATABASE_ERRORS = (psycopg.Error, PoolTimeout, PoolClosed)
logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # failures are raised as KnowgateError instead


def to_psycopg_query(query: str) -> bytes:
    """Convert a statement with ? for parameters to the placeholders %s of psycopg."""
    return query.replace("%", "%%").replace("?", "%s").encode()


class WriteTransaction:
    """Open transaction. Its statements use question marks for parameters."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def execute(self, query: str, values: Sequence[Any] = ()) -> psycopg.Cursor[tuple[Any, ...]]:
        return self.connection.execute(to_psycopg_query(query), list(values))

    def executemany(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany(to_psycopg_query(query), rows)


class PostgresDatabase:
    """A PostgreSQL database. The first use connects, and creates or upgrades the tables.

    Args:
        address: The address.
        schema: Tables to create or migrate on first use; None for tables that knowgate does not manage.
        settings: PostgreSQL settings of every connection, such as (("hnsw.ef_search", "100"),).
    """

    def __init__(self, address: DatabaseAddress, schema: TableSchema | None = None, settings: Settings = ()):
        self.address = address
        self.schema = schema
        self.settings = settings
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Connection] | None = None

    @property
    def path(self) -> str:
        """The address without secrets, for messages."""
        return self.address.redacted

    @property
    def has_tables(self) -> bool:
        """Whether the tables exist. Does not create them."""
        assert self.schema is not None
        with self._connect() as connection:
            return migrations.get_version(connection, self.address, self.schema) is not None

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query with question marks for `values`, and return its rows.

        After a lost connection, it runs once more.
        """
        with self._translate_errors():
            try:
                with self._open_pool().connection() as connection:
                    return connection.execute(to_psycopg_query(query), list(values)).fetchall()
            except psycopg.OperationalError as error:
                # Without a code, the error does not come from the server, which means that the connection is lost.
                if error.sqlstate is not None and not error.sqlstate.startswith(LOST_CONNECTION_STATES):
                    raise
        with self.connection() as connection:
            return connection.execute(to_psycopg_query(query), list(values)).fetchall()

    def write(self, work: Callable[[WriteTransaction], Result]) -> Result:
        """Call `work` in a transaction and return its result. After a conflict, `work` is called again."""
        with self._translate_errors():
            for tries_left in reversed(range(MAX_TRANSACTION_TRIES)):
                try:
                    with self._get_live_connection() as connection, connection.transaction():
                        return work(WriteTransaction(connection))
                except RETRYABLE_ERRORS:
                    if not tries_left:
                        raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextlib.contextmanager
    def transaction(self, lock: str = "") -> Iterator[WriteTransaction]:
        """Open a transaction.

        Args:
            lock: Name of a lock. The transaction waits until no other transaction of any process holds the lock, and
                holds it until it ends. Empty for no lock.
        """
        with self.connection() as connection, connection.transaction():
            if lock:
                name = f"{self.address.schema}/{lock}"
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [name])
            yield WriteTransaction(connection)

    def execute_outside_transaction(
        self, statements: Sequence[str], on_warning: Callable[[str], None], lock: str = ""
    ) -> bool:
        """Run statements one by one without a transaction. VACUUM requires this.

        Args:
            statements: The statements.
            on_warning: Called with each warning of the server.
            lock: Name of a lock; if another process holds the lock, no statement is run. Empty for no lock.

        Returns:
            Whether the statements were run.
        """

        def handle_notice(diagnostic: psycopg.errors.Diagnostic) -> None:
            if diagnostic.severity_nonlocalized == "WARNING":
                on_warning(self.address.redact(str(diagnostic.message_primary)))

        with self.connection() as connection:
            connection.add_notice_handler(handle_notice)
            try:
                if lock and not self._try_lock(connection, lock):
                    return False
                for statement in statements:
                    connection.execute(statement.encode())
                return True
            finally:
                connection.remove_notice_handler(handle_notice)
                connection.close()  # drops its session settings and locks

    def vacuum(
        self, tables: Sequence[str], on_warning: Callable[[str], None], lock_seconds: int = VACUUM_LOCK_SECONDS
    ) -> bool:
        """Remove deleted rows from the database files. `on_warning` is told what could not be removed.

        Returns:
            Whether VACUUM worked for all tables. It fails if another session holds a lock for longer than `lock_seconds`.
            Then the tables after it are not vacuumed, because each attempt holds up other sessions.
        """
        set_timeout = f"SET lock_timeout = '{lock_seconds}s'"
        for table in tables:
            is_small = self.read("SELECT pg_total_relation_size(?) <= ?", [table, SMALL_TABLE_BYTES])[0][0]
            vacuum = f"VACUUM (FULL) {table}" if is_small else f"VACUUM {table}"  # FULL rewrites the whole table
            try:
                self.execute_outside_transaction([set_timeout, vacuum], on_warning)
            except KnowgateError as error:
                on_warning(f"The rows are deleted, but traces of them remain in the database files: {error}")
                return False
            if not is_small:
                on_warning(
                    "Deleted and vacuumed. The table is too large to be rewritten now, so free space in its file may "
                    f"contain traces until it is reused. At a quiet time: VACUUM FULL {self.address.schema}.{table};"
                )
        return True

    def _try_lock(self, connection: Connection, lock: str) -> bool:
        """Try to take a lock without waiting, and return whether it succeeded.

        The lock lasts as long as the connection.
        """
        name = f"{self.address.schema}/{lock}"
        row = connection.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [name]).fetchone()
        return bool(row and row[0])

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Get a working connection. Database errors inside the block are raised as KnowgateError."""
        with self._translate_errors(), self._get_live_connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise database errors inside the block as KnowgateError."""
        try:
            yield
        except DATABASE_ERRORS as error:
            raise migrations.translate_error(self.address, error) from None

    @contextlib.contextmanager
    def _get_live_connection(self) -> Iterator[Connection]:
        """Lend a working connection from the pool. Dead connections are replaced first."""
        pool = self._open_pool()
        connection = pool.getconn()
        try:
            ConnectionPool.check_connection(connection)
        except psycopg.Error:
            pool.putconn(connection)
            pool.check()  # replaces dead connections
            connection = pool.getconn()
        try:
            yield connection
        finally:
            pool.putconn(connection)

    def _open_pool(self) -> ConnectionPool[Connection]:
        """Return the connection pool. The first call creates or upgrades the tables and opens the pool."""
        with self._lock:
            if self._pool is None:
                with self._connect() as connection:
                    if self.schema is not None:
                        migrations.prepare_tables(connection, self.address, self.schema)
                self._pool = ConnectionPool(
                    self.address.conninfo,
                    kwargs=self._connect_options,
                    min_size=0,
                    max_size=MAX_CONNECTIONS,
                    open=True,
                    configure=self._configure,
                    timeout=CONNECT_TIMEOUT,
                    max_idle=MAX_IDLE_SECONDS,
                    reconnect_timeout=CONNECT_TIMEOUT,
                    num_workers=1,
                )
            return self._pool

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Connection]:
        """Open a connection without the pool. Unlike the pool, it reports the reason of a failure."""
        try:
            connection = psycopg.connect(self.address.conninfo, **self._connect_options)
        except (psycopg.Error, UnicodeError, ValueError) as error:
            raise migrations.make_connection_error(self.address, error) from None
        with self._translate_errors(), contextlib.closing(connection):
            yield connection

    @property
    def _connect_options(self) -> dict[str, Any]:
        """Options for new connections. The address overrides the defaults."""
        defaults = {"application_name": "knowgate", "connect_timeout": str(int(CONNECT_TIMEOUT)), **KEEPALIVE_OPTIONS}
        missing = {name: value for name, value in defaults.items() if f"{name}=" not in self.address.conninfo}
        return {**missing, "autocommit": True}

    def _configure(self, connection: Connection) -> None:
        """Prepare a new connection: set its schema and settings."""
        if self.schema is not None:
            migrations.set_search_path(connection, self.address)
        for name, value in self.settings:
            connection.execute("SELECT set_config(%s, %s, false)", [name, value])

    def close(self) -> None:
        """Close all connections. A later query opens new ones."""
        with self._lock:
            pool = self._pool
            self._pool = None
        if pool is not None:
            pool.close()
