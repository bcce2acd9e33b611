"""Tables that grow by version: which version a schema has, and the steps from there to ours, all of them or none.

A table `versions` says what is there. A schema that says one thing and holds another is refused and left as it is; so
is one that a newer knowgate made, and tables of somebody else. One process migrates, the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg_pool import PoolTimeout

from knowgate.core.postgres import TableSchema
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import ArtifactError, BadSetting, KnowgateError

MAX_SERVER_MESSAGE_CHARS = 300  # characters of a server's own words
LOGIN_ERRORS = (errors.InvalidPassword, errors.InvalidAuthorizationSpecification)
MISSING_OBJECT_ERRORS = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    errors.UndefinedFunction,
)
CAPACITY_ERRORS = (errors.DiskFull, errors.OutOfMemory)
BUSY_ERRORS = (errors.LockNotAvailable, errors.DeadlockDetected, errors.QueryCanceled, errors.TooManyConnections)


def translate_error(address: DatabaseAddress, error: Exception) -> KnowgateError:
    """The error to raise instead."""
    shown, said = address.shown, _words(address, error)
    if isinstance(error, PoolTimeout):
        return KnowgateError(f"the database {shown} did not answer in time: check that it runs and is not overloaded.")
    if isinstance(error, errors.InsufficientPrivilege):
        return BadSetting(
            f"this user may not do that in the database {shown}: {said}. Let its owner grant the rights on the schema "
            f"'{address.schema}', or give the address of a user who has them."
        )
    if isinstance(error, MISSING_OBJECT_ERRORS):
        return make_schema_error(address, said)
    if isinstance(error, CAPACITY_ERRORS):
        return KnowgateError(f"the database {shown} has no room: {said}. What was written before is safe; make room.")
    if isinstance(error, BUSY_ERRORS):
        return KnowgateError(f"the database {shown} is busy: {said}. Try again in a moment.")
    if isinstance(error, psycopg.OperationalError):
        return make_connection_error(address, error)
    return ArtifactError(f"the database {shown} cannot be used: {said}.")


def make_connection_error(address: DatabaseAddress, error: Exception) -> KnowgateError:
    said = _words(address, error)
    if isinstance(error, psycopg.ProgrammingError):  # libpq cannot read it; its words may quote any part of it
        return BadSetting(
            f"the address {address.shown} cannot be read: write a user or password with special characters as %40 (@), "
            "%2F (/), %3A (:), or leave the password to PGPASSWORD."
        )
    if "password" in said or isinstance(error, LOGIN_ERRORS):
        return KnowgateError(
            f"the database {address.shown} refused the login: {said}. Check the user, and the password in PGPASSWORD, "
            "~/.pgpass or the address."
        )
    return KnowgateError(f"cannot reach the database {address.shown}: {said}. Check that it runs and the address.")


def make_schema_error(address: DatabaseAddress, why: str) -> KnowgateError:
    return ArtifactError(
        f"the schema '{address.schema}' of {address.shown} is not whole, as if a migration had been cut off or undone: "
        f"{why}. It was left as it is: restore it from a backup, or name another one with ?schema=NAME."
    )


def _words(address: DatabaseAddress, error: Exception) -> str:
    """The first line of what was said; the others are hints and positions."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    lines = str(primary or error).strip().splitlines() or [type(error).__name__]
    return address.hide(lines[0])[:MAX_SERVER_MESSAGE_CHARS]


Connection = psycopg.Connection[tuple[Any, ...]]
CREATE_VERSIONS_TABLE = "CREATE TABLE IF NOT EXISTS versions (part TEXT PRIMARY KEY, version INTEGER NOT NULL)"
MIGRATION_LOCK_ID = 7_206_113_301  # any number: the lock of those who migrate
MIN_PGVECTOR_VERSION = (0, 8)  # has iterative scans: with filters an older one finds too few rows


def set_search_path(connection: Connection, address: DatabaseAddress) -> None:
    """From here on names are those of the schema, and of pgvector wherever that lives."""
    where = (
        "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    )
    found = connection.execute(where).fetchone()
    names = [address.schema, *(str(name) for name in found or ())]
    path = sql.SQL(", ").join(sql.Identifier(name) for name in names)
    connection.execute(sql.SQL("SET search_path TO {}").format(path))


def has_tables(connection: Connection, address: DatabaseAddress, part: TableSchema) -> bool:
    """Whether a schema has this part, of any version."""
    return _version(connection, address, part) is not None


def prepare_tables(connection: Connection, address: DatabaseAddress, part: TableSchema) -> None:
    """The tables of this part are there, as this knowgate knows them."""
    set_search_path(connection, address)
    if part.has_vectors and _vector_version(connection) is None:
        _add_vectors(connection, address)
    if part.has_vectors:
        _check_vectors(connection, address)
    if _version(connection, address, part) != part.version:
        _migrate(connection, address, part)
    _check_tables(connection, address, part)
    set_search_path(connection, address)


def _migrate(connection: Connection, address: DatabaseAddress, part: TableSchema) -> None:
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK_ID])
        _make_schema(connection, address)
        set_search_path(connection, address)
        version = _version(connection, address, part)
        if version is None and (strange := set(part.tables) & set(_columns(connection, address))):
            raise make_schema_error(address, f"it has a table '{min(strange)}', and nothing says of which version")
        if (version or 0) > part.version:
            raise ArtifactError(
                f"the tables '{part.name}' in {address.shown} have version {version}, made by a newer knowgate; this "
                f"one knows versions up to {part.version}. Update it: pip install -U knowgate"
            )
        for statements in part.steps[version or 0 :]:
            _run(connection, statements)
        connection.execute(
            "INSERT INTO versions VALUES (%s, %s) ON CONFLICT (part) DO UPDATE SET version = excluded.version",
            [part.name, part.version],
        )


def _run(connection: Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def _make_schema(connection: Connection, address: DatabaseAddress) -> None:
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [address.schema]).fetchone()
    if found is None:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(address.schema)))
    set_search_path(connection, address)
    connection.execute(CREATE_VERSIONS_TABLE)


def _version(connection: Connection, address: DatabaseAddress, part: TableSchema) -> int | None:
    found = connection.execute("SELECT to_regclass(%s)", [f'"{address.schema}".versions']).fetchone()
    if found is None or found[0] is None:
        return None
    query = sql.SQL("SELECT version FROM {}.versions WHERE part = %s").format(sql.Identifier(address.schema))
    row = connection.execute(query, [part.name]).fetchone()
    return None if row is None else int(row[0])


def _check_tables(connection: Connection, address: DatabaseAddress, part: TableSchema) -> None:
    there = _columns(connection, address)
    for table, columns in part.tables.items():
        if missing := columns - there.get(table, set()):
            what = f"its table '{table}' has no column '{min(missing)}'" if table in there else f"no table '{table}'"
            raise make_schema_error(address, f"it says version {part.version} of '{part.name}', but {what}")


def _columns(connection: Connection, address: DatabaseAddress) -> dict[str, set[str]]:
    """By table. Not from information_schema, which hides what a user may not use."""
    rows = connection.execute(
        "SELECT c.relname, a.attname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "WHERE n.nspname = %s AND c.relkind IN ('r', 'p', 'v')",
        [address.schema],
    ).fetchall()
    found: dict[str, set[str]] = {}
    for table, column in rows:
        found.setdefault(table, set()).add(column)
    return found


# --- pgvector -------------------------------------------------------------------------------------


def _vector_version(connection: Connection) -> tuple[int, ...] | None:
    row = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
    return None if row is None else tuple(int(part) for part in str(row[0]).split(".")[:2])


def _add_vectors(connection: Connection, address: DatabaseAddress) -> None:
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
    except psycopg.errors.UniqueViolation:
        return  # somebody else did, at the same moment
    except psycopg.errors.InsufficientPrivilege:
        raise BadSetting(
            f"the database {address.shown} has no pgvector, and this user may not add it. Let an administrator run in "
            "it: CREATE EXTENSION vector;"
        ) from None
    except (psycopg.errors.UndefinedFile, psycopg.errors.FeatureNotSupported):
        raise BadSetting(_not_installed(address)) from None


def _not_installed(address: DatabaseAddress) -> str:
    return (
        f"the server of {address.shown} has no pgvector: install it there (package postgresql-NN-pgvector, or image "
        "pgvector/pgvector), then run in the database: CREATE EXTENSION vector;"
    )


def _check_vectors(connection: Connection, address: DatabaseAddress) -> None:
    found = _vector_version(connection)
    if found is None:
        raise KnowgateError(_not_installed(address))
    if found < MIN_PGVECTOR_VERSION:
        raise BadSetting(
            f"the database {address.shown} has pgvector {'.'.join(map(str, found))}; needed is "
            f"{'.'.join(map(str, MIN_PGVECTOR_VERSION))} or newer. Update it, then run: ALTER EXTENSION vector UPDATE;"
        )
