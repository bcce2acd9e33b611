"""A database behind a pool of connections: opened on first use, the tables made or checked before anything is asked.

Statements are written with question marks, as for SQLite, so that both can share them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from knowgate.core.postgres import TableSchema
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.core.postgres.migrations import (
    Connection,
    has_tables,
    make_connection_error,
    prepare_tables,
    set_search_path,
    translate_error,
)
from knowgate.errors import KnowgateError

Result = TypeVar("Result")
MAX_CONNECTIONS = 8  # of one process, at most
CONNECT_TIMEOUT = 10.0  # seconds for a connection, of the pool or new
MAX_IDLE_SECONDS = 120.0  # seconds after which a connection that nobody needs is closed
MAX_TRANSACTION_TRIES = 5
LOST_CONNECTION_STATES = ("08", "57P0")  # states: the connection is gone, the server is stopped or just starts
SMALL_TABLE_BYTES = 64 << 20  # bytes of a table that is written anew in seconds
VACUUM_LOCK_TIMEOUT = "5s"  # to wait for the turn to do that
RETRYABLE_ERRORS = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
DATABASE_ERRORS = (psycopg.Error, PoolTimeout, PoolClosed)
logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # what fails is said once, in our own words


def to_psycopg_query(query: str) -> bytes:
    """The statement as psycopg wants it."""
    return query.replace("%", "%%").replace("?", "%s").encode()


class WriteTransaction:
    """A transaction that writes; statements as for SQLite."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def execute(self, query: str, values: Sequence[Any] = ()) -> psycopg.Cursor[tuple[Any, ...]]:
        return self.connection.execute(to_psycopg_query(query), list(values))

    def executemany(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany(to_psycopg_query(query), rows)


class PostgresDatabase:
    """One part of one schema. settings: of every connection, such as {"hnsw.ef_search": "100"}."""

    def __init__(
        self, address: DatabaseAddress, part: TableSchema | None = None, settings: tuple[tuple[str, str], ...] = ()
    ):
        self.address = address
        self.part = part
        self.settings = settings
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Connection] | None = None

    @property
    def path(self) -> str:
        """How it is named in sentences."""
        return self.address.shown

    @property
    def is_made(self) -> bool:
        """Whether its tables are there; looking does not make them."""
        assert self.part is not None
        with self._connected() as connection:
            try:
                return has_tables(connection, self.address, self.part)
            except psycopg.Error as error:
                raise translate_error(self.address, error) from None

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Asked again where the connection turns out to be dead: looking at it before would take as long as reading."""
        try:
            return self._read(query, values)
        except psycopg.OperationalError as error:
            if error.sqlstate is not None and not error.sqlstate.startswith(LOST_CONNECTION_STATES):
                raise translate_error(self.address, error) from None
        except DATABASE_ERRORS as error:
            raise translate_error(self.address, error) from None
        with self.connection() as connection:
            return connection.execute(to_psycopg_query(query), list(values)).fetchall()

    def _read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._opened().connection() as connection:
            return connection.execute(to_psycopg_query(query), list(values)).fetchall()

    def write(self, work: Callable[[WriteTransaction], Result]) -> Result:
        """Work that may be done twice, in a transaction: again where it crossed another one that did the same."""
        for left in reversed(range(MAX_TRANSACTION_TRIES)):
            try:
                with self._alive() as connection, connection.transaction():
                    return work(WriteTransaction(connection))
            except RETRYABLE_ERRORS as error:
                if not left:
                    raise translate_error(self.address, error) from None
            except DATABASE_ERRORS as error:
                raise translate_error(self.address, error) from None
        raise AssertionError("one of the tries was the last")

    @contextlib.contextmanager
    def transaction(self, turn: str = "") -> Iterator[WriteTransaction]:
        """All of it or nothing. turn: of those who name the same one, in any process, one after the other."""
        with self.connection() as connection, connection.transaction():
            if turn:
                where = f"{self.address.schema}/{turn}"
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [where])
            yield WriteTransaction(connection)

    def alone(self, statements: Sequence[str], notice: Callable[[str], None], turn: str = "") -> bool:
        """One after the other on one connection, outside of any transaction. notice: hears what the server warns of.

        turn: False, and nothing is done, while somebody else, in any process, is at it.
        """

        def hear(diagnostic: psycopg.errors.Diagnostic) -> None:
            if diagnostic.severity_nonlocalized == "WARNING":
                notice(self.address.hide(str(diagnostic.message_primary)))

        with self.connection() as connection:
            connection.add_notice_handler(hear)
            try:
                if turn and not self._takes(connection, turn):
                    return False
                for statement in statements:
                    connection.execute(statement.encode())
                return True
            finally:
                connection.remove_notice_handler(hear)
                connection.close()  # with what was set on it

    def sweep(self, tables: Sequence[str], notice: Callable[[str], None]) -> None:
        """What was deleted stays in the files until it is swept; a small table is written anew instead."""
        for table in tables:
            is_small = self.read("SELECT pg_total_relation_size(?) <= ?", [table, SMALL_TABLE_BYTES])[0][0]
            statement = f"VACUUM (FULL) {table}" if is_small else f"VACUUM {table}"
            try:
                self.alone([f"SET lock_timeout = '{VACUUM_LOCK_TIMEOUT}'", statement], notice)
            except KnowgateError as error:
                notice(f"Deleted, but not yet swept from the files of the database: {error}")
            if not is_small:
                notice(
                    "Deleted and swept. The table is large, so it was not written anew: free space in its file may "
                    f"hold traces until it is used again. In a quiet hour: VACUUM FULL {self.address.schema}.{table};"
                )

    def _takes(self, connection: Connection, turn: str) -> bool:
        where = f"{self.address.schema}/{turn}"
        row = connection.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [where]).fetchone()
        return bool(row and row[0])

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """One that is alive. What fails is said in a sentence; errors of others pass."""
        try:
            with self._alive() as connection:
                yield connection
        except DATABASE_ERRORS as error:
            raise translate_error(self.address, error) from None

    @contextlib.contextmanager
    def _alive(self) -> Iterator[Connection]:
        """A server that was started anew has none of the connections that the pool knows."""
        pool = self._opened()
        connection = pool.getconn()
        try:
            ConnectionPool.check_connection(connection)
        except psycopg.Error:
            pool.putconn(connection)
            pool.check()
            connection = pool.getconn()
        try:
            yield connection
        finally:
            pool.putconn(connection)

    def _opened(self) -> ConnectionPool[Connection]:
        with self._lock:
            if self._pool is None:
                with self._connected() as connection:
                    self._prepare(connection)
                self._pool = self._new_pool()
            return self._pool

    def _prepare(self, connection: Connection) -> None:
        if self.part is None:
            return
        try:
            prepare_tables(connection, self.address, self.part)
        except psycopg.Error as error:
            raise translate_error(self.address, error) from None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A connection of its own: where there is none, a pool would only say that it waited."""
        try:
            connection = psycopg.connect(self.address.conninfo, **self._options)
        except (psycopg.Error, UnicodeError, ValueError) as error:
            raise make_connection_error(self.address, error) from None
        with contextlib.closing(connection):
            yield connection

    @property
    def _options(self) -> dict[str, Any]:
        given = {} if "application_name=" in self.address.conninfo else {"application_name": "knowgate"}
        if "connect_timeout=" not in self.address.conninfo:
            given["connect_timeout"] = str(int(CONNECT_TIMEOUT))
        return {**given, "autocommit": True}

    def _new_pool(self) -> ConnectionPool[Connection]:
        return ConnectionPool(
            self.address.conninfo,
            kwargs=self._options,
            min_size=0,
            max_size=MAX_CONNECTIONS,
            open=True,
            configure=self._configure,
            timeout=CONNECT_TIMEOUT,
            max_idle=MAX_IDLE_SECONDS,
            reconnect_timeout=CONNECT_TIMEOUT,
            num_workers=1,
        )

    def _configure(self, connection: Connection) -> None:
        if self.part is not None:
            set_search_path(connection, self.address)
        for name, value in self.settings:
            connection.execute("SELECT set_config(%s, %s, false)", [name, value])

    def close(self) -> None:
        """Let go of all connections; it can still be used."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
