"""The door for PostgreSQL (extra `postgres`): addresses without their passwords, a pool, tables that grow by version.

Every failure is one sentence, and no sentence holds a password. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import KnowgateError, MissingExtra

if TYPE_CHECKING:
    from knowgate.core.postgres.database import PostgresDatabase


@dataclass(frozen=True)
class TableSchema:
    """Tables that belong together. steps: statements that lead to version 1, 2, ... tables: columns as they are then.

    has_vectors: pgvector is needed.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    tables: Mapping[str, frozenset[str]]
    has_vectors: bool = False

    @property
    def version(self) -> int:
        return len(self.steps)


_OPEN: dict[tuple[int, DatabaseAddress, str], PostgresDatabase] = {}
_OPENING = threading.Lock()


def open_postgres(
    address: DatabaseAddress, part: TableSchema | None = None, settings: tuple[tuple[str, str], ...] = ()
) -> PostgresDatabase:
    """part: None for tables of somebody else. settings: of every connection."""
    try:
        from knowgate.core.postgres.database import PostgresDatabase
    except ModuleNotFoundError:
        raise MissingExtra(f"the database {address.shown}", "postgres") from None
    key = (os.getpid(), address, part.name if part is not None else "")  # connections do not survive a fork
    with _OPENING:
        if not _OPEN:
            atexit.register(_close_all)
        return _OPEN.setdefault(key, PostgresDatabase(address, part, settings))


def _close_all() -> None:
    for (process, *_), database in list(_OPEN.items()):
        if process == os.getpid():
            with contextlib.suppress(KnowgateError):
                database.close()
