"""PostgreSQL (extra `postgres`): addresses, connection pools, and versioned tables. No message contains a password."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import KnowgateError, require_extra

if TYPE_CHECKING:
    from knowgate.core.postgres.database import PostgresDatabase


@dataclass(frozen=True)
class TableSchema:
    """Definition of a group of tables that are created and upgraded together.

    Attributes:
        name: Name of the group.
        steps: Migrations. The first contains the SQL statements that create version 1, the next those that upgrade to
            version 2, and so on.
        tables: Names of the columns of each table in the latest version.
        has_vectors: Whether the tables need the extension pgvector.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    tables: Mapping[str, frozenset[str]]
    has_vectors: bool = False

    @property
    def version(self) -> int:
        """The latest version of the tables, which is the number of migrations."""
        return len(self.steps)


Settings = tuple[tuple[str, str], ...]  # names and values of PostgreSQL settings
_OPEN: dict[tuple[int, DatabaseAddress, str, Settings], PostgresDatabase] = {}
_OPEN_LOCK = threading.Lock()


def open_postgres(
    address: DatabaseAddress, schema: TableSchema | None = None, settings: Settings = ()
) -> PostgresDatabase:
    """Return the database at an address. Calls with the same arguments share one object.

    Args:
        address: The address of the database.
        schema: Tables to create or upgrade on first use; None to use tables that knowgate does not manage.
        settings: Names and values of PostgreSQL settings for every connection.
    """
    with require_extra(f"the database {address.redacted}", "postgres"):
        from knowgate.core.postgres.database import PostgresDatabase
    schema_name = schema.name if schema is not None else ""
    key = (os.getpid(), address, schema_name, settings)  # connections do not survive a fork
    with _OPEN_LOCK:
        if not _OPEN:
            atexit.register(_close_all)
        return _OPEN.setdefault(key, PostgresDatabase(address, schema, settings))


def _close_all() -> None:
    """Close the databases opened by this process. Databases inherited by a fork stay open."""
    for key, database in list(_OPEN.items()):
        process_id = key[0]
        if process_id == os.getpid():
            with contextlib.suppress(KnowgateError):
                database.close()
