"""Database errors in plain words, and migrations, which create tables or upgrade them to the latest version.

The table `versions` records the version of each group of tables. All steps of a migration run in one transaction. An
error is raised, and nothing is changed, if the tables do not match their recorded version, belong to another program,
or were made by a newer knowgate. Only one process migrates at a time; others wait.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg_pool import PoolTimeout

from knowgate.core.postgres import TableSchema
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import ArtifactError, BadSetting, KnowgateError

Connection = psycopg.Connection[tuple[Any, ...]]
MAX_SERVER_MESSAGE_CHARS = 300
LOGIN_ERRORS = (errors.InvalidPassword, errors.InvalidAuthorizationSpecification)
MISSING_OBJECT_ERRORS = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    errors.UndefinedFunction,
)
CAPACITY_ERRORS = (errors.DiskFull, errors.OutOfMemory)
BUSY_ERRORS = (errors.LockNotAvailable, errors.DeadlockDetected, errors.QueryCanceled, errors.TooManyConnections)
CREATE_VERSIONS_TABLE = "CREATE TABLE IF NOT EXISTS versions (part TEXT PRIMARY KEY, version INTEGER NOT NULL)"
MIGRATION_LOCK_ID = 7_206_113_301  # an arbitrary number that all processes use for the lock
MIN_PGVECTOR_VERSION = (0, 8)  # older versions lack iterative scans and find too few rows with filters


def translate_error(address: DatabaseAddress, error: Exception) -> KnowgateError:
    """Convert a psycopg error to a KnowgateError with advice."""
    database = address.redacted
    message = _get_message(address, error)
    if isinstance(error, PoolTimeout):
        return KnowgateError(
            f"the database {database} did not answer in time. Check that it runs and is not overloaded."
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return BadSetting(
            f"this user lacks permissions in the database {database}: {message}. Ask its owner to grant permissions on "
            f"the schema '{address.schema}', or use the address of another user."
        )
    if isinstance(error, MISSING_OBJECT_ERRORS):
        return make_schema_error(address, message)
    if isinstance(error, CAPACITY_ERRORS):
        return KnowgateError(f"the database {database} is full: {message}. Earlier writes are safe. Free some space.")
    if isinstance(error, BUSY_ERRORS):
        return KnowgateError(f"the database {database} is busy: {message}. Try again in a moment.")
    if isinstance(error, psycopg.OperationalError):
        return make_connection_error(address, error)
    return ArtifactError(f"the database {database} cannot be used: {message}.")


def make_connection_error(address: DatabaseAddress, error: Exception) -> KnowgateError:
    """Make the error for a database that cannot be reached or rejects the login."""
    message = _get_message(address, error)
    if isinstance(error, psycopg.ProgrammingError):  # libpq's message may quote secret parts of the address
        return BadSetting(
            f"the address {address.redacted} cannot be parsed. Write special characters in user and password as %40 "
            "(@), %2F (/), %3A (:), or put the password into PGPASSWORD."
        )
    if "password" in message or isinstance(error, LOGIN_ERRORS):
        return KnowgateError(
            f"the database {address.redacted} refused the login: {message}. Check the user, and the password in "
            "PGPASSWORD, ~/.pgpass or the address."
        )
    return KnowgateError(
        f"cannot reach the database {address.redacted}: {message}. Check the address, and that the database runs."
    )


def make_schema_error(address: DatabaseAddress, problem: str) -> KnowgateError:
    """Make the error for tables that do not match their recorded version."""
    return ArtifactError(
        f"the schema '{address.schema}' of {address.redacted} is inconsistent, as after an interrupted migration: "
        f"{problem}. It was not changed. Restore it from a backup, or choose another schema with ?schema=NAME."
    )


def _get_message(address: DatabaseAddress, error: Exception) -> str:
    """Return the first line of a server's error message, without secrets."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    lines = str(primary or error).strip().splitlines() or [type(error).__name__]
    return address.redact(lines[0])[:MAX_SERVER_MESSAGE_CHARS]


def set_search_path(connection: Connection, address: DatabaseAddress) -> None:
    """Set where a connection looks for tables and for pgvector types."""
    row = connection.execute(
        "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    ).fetchone()
    names = [address.schema] if row is None else [address.schema, str(row[0])]
    path = sql.SQL(", ").join(sql.Identifier(name) for name in names)
    connection.execute(sql.SQL("SET search_path TO {}").format(path))


def prepare_tables(connection: Connection, address: DatabaseAddress, schema: TableSchema) -> None:
    """Create or upgrade the tables, and check that they match the latest version."""
    set_search_path(connection, address)
    if schema.has_vectors:
        _prepare_pgvector(connection, address)
    if get_version(connection, address, schema) != schema.version:
        _migrate(connection, address, schema)
    _check_tables(connection, address, schema)
    set_search_path(connection, address)  # again, because the schemas may have been created only now


def _migrate(connection: Connection, address: DatabaseAddress, schema: TableSchema) -> None:
    """Run the migrations from the recorded version to the latest one, in a single transaction.

    Raises:
        KnowgateError: Another program or a newer knowgate created the tables.
    """
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK_ID])
        _create_schema(connection, address)
        version = _check_version(connection, address, schema)
        for statements in schema.steps[version:]:
            for statement in statements:
                connection.execute(statement.encode())
        connection.execute(
            "INSERT INTO versions VALUES (%s, %s) ON CONFLICT (part) DO UPDATE SET version = excluded.version",
            [schema.name, schema.version],
        )


def _check_version(connection: Connection, address: DatabaseAddress, schema: TableSchema) -> int:
    """Return the recorded version of the tables; 0 if there are none yet.

    Raises:
        KnowgateError: Another program or a newer knowgate created the tables.
    """
    version = get_version(connection, address, schema)
    existing = set(schema.tables) & set(_get_columns(connection, address))
    if version is None and existing:
        raise make_schema_error(address, f"the table '{min(existing)}' has no recorded version")
    if version is not None and version > schema.version:
        raise ArtifactError(
            f"the tables '{schema.name}' in {address.redacted} have format {version}, but this version of knowgate reads up to "
            f"{schema.version}. Update knowgate: pip install -U knowgate"
        )
    return version or 0


def _create_schema(connection: Connection, address: DatabaseAddress) -> None:
    """Create the schema and its table of versions, if missing."""
    row = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [address.schema]).fetchone()
    if row is None:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(address.schema)))
    set_search_path(connection, address)
    connection.execute(CREATE_VERSIONS_TABLE)


def get_version(connection: Connection, address: DatabaseAddress, schema: TableSchema) -> int | None:
    """Return the recorded version of the tables; None if they were never created."""
    row = connection.execute("SELECT to_regclass(%s)", [f'"{address.schema}".versions']).fetchone()
    if row is None or row[0] is None:
        return None
    query = sql.SQL("SELECT version FROM {}.versions WHERE part = %s").format(sql.Identifier(address.schema))
    row = connection.execute(query, [schema.name]).fetchone()
    return None if row is None else int(row[0])


def _check_tables(connection: Connection, address: DatabaseAddress, schema: TableSchema) -> None:
    """Raise ArtifactError if a table or column of the latest version is missing."""
    existing = _get_columns(connection, address)  # of each table that exists
    for table, columns in schema.tables.items():
        missing = columns - existing.get(table, set())
        if missing:
            problem = f"table '{table}' has no column '{min(missing)}'" if table in existing else f"no table '{table}'"
            raise make_schema_error(address, f"the tables of '{schema.name}' are incomplete: {problem}")


def _get_columns(connection: Connection, address: DatabaseAddress) -> dict[str, set[str]]:
    """Return the column names of each table in the schema."""
    # information_schema would hide tables on which the user has no permissions.
    rows = connection.execute(
        "SELECT c.relname, a.attname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "WHERE n.nspname = %s AND c.relkind IN ('r', 'p', 'v')",
        [address.schema],
    ).fetchall()
    columns: dict[str, set[str]] = {}
    for table, column in rows:
        columns.setdefault(table, set()).add(column)
    return columns


# --- pgvector -------------------------------------------------------------------------------------


def _prepare_pgvector(connection: Connection, address: DatabaseAddress) -> None:
    """Create the extension pgvector in the database if it is missing, and check its version."""
    version = _get_pgvector_version(connection)
    if version is None:
        _create_pgvector(connection, address)
        version = _get_pgvector_version(connection)
    if version is None or version < MIN_PGVECTOR_VERSION:
        needed = ".".join(map(str, MIN_PGVECTOR_VERSION))
        raise BadSetting(
            f"the database {address.redacted} has an old version of pgvector, but knowgate needs {needed} or newer. "
            "Update pgvector, then run: ALTER EXTENSION vector UPDATE;"
        )


def _get_pgvector_version(connection: Connection) -> tuple[int, ...] | None:
    """Return the installed version of pgvector, such as (0, 8); None if it is missing."""
    row = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
    return None if row is None else tuple(int(number) for number in str(row[0]).split(".")[:2])


def _create_pgvector(connection: Connection, address: DatabaseAddress) -> None:
    """Create the pgvector extension in the database.

    Raises:
        BadSetting: The server has no pgvector, or this user may not create the extension.
    """
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
    except psycopg.errors.UniqueViolation:
        return  # another process created it at the same moment
    except (errors.InsufficientPrivilege, errors.UndefinedFile, errors.FeatureNotSupported) as error:
        raise BadSetting(
            f"the database {address.redacted} lacks the extension pgvector. Creating it failed: "
            f"{_get_message(address, error)}. Install the package postgresql-NN-pgvector on the server, or use the image "
            "pgvector/pgvector. Then ask an administrator to run: CREATE EXTENSION vector;"
        ) from None
