"""The door for PostgreSQL (extra `postgres`): addresses without their passwords, a pool, tables that grow by version.

Every failure is one sentence, and no sentence holds a password. Knows nothing of what the tables mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.postgres.address import DatabaseAddress, is_postgres, read_database_address, without_password
    from knowgate.postgres.database import Postgres, Writing
    from knowgate.postgres.opening import open_postgres
    from knowgate.postgres.part import Part
    from knowgate.postgres.values import as_vector, storable
else:
    __getattr__, __dir__ = hand_on(__name__)

__all__ = [
    "DatabaseAddress",
    "Part",
    "Postgres",
    "Writing",
    "as_vector",
    "is_postgres",
    "open_postgres",
    "read_database_address",
    "storable",
    "without_password",
]
