"""The databases that this process has open: the same one for the same tables, so that connections are shared."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from knowgate.errors import KnowgateError, MissingExtra
from knowgate.postgres.address import DatabaseAddress
from knowgate.postgres.part import Part

if TYPE_CHECKING:
    from knowgate.postgres.database import Postgres

_OPEN: dict[tuple[int, DatabaseAddress, str], Postgres] = {}
_OPENING = threading.Lock()


def open_postgres(
    address: DatabaseAddress, part: Part | None = None, settings: tuple[tuple[str, str], ...] = ()
) -> Postgres:
    """part: None for tables of somebody else. settings: of every connection."""
    try:
        from knowgate.postgres.database import Postgres
    except ModuleNotFoundError:
        raise MissingExtra(f"the database {address.shown}", "postgres") from None
    key = (os.getpid(), address, part.name if part is not None else "")  # connections do not survive a fork
    with _OPENING:
        if not _OPEN:
            atexit.register(_close_all)
        return _OPEN.setdefault(key, Postgres(address, part, settings))


def _close_all() -> None:
    for (process, *_), database in list(_OPEN.items()):
        if process == os.getpid():
            with contextlib.suppress(KnowgateError):
                database.close()
