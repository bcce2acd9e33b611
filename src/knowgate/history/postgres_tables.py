"""The tables of the log in PostgreSQL, version by version. A step that was released is never changed: add another."""

from __future__ import annotations

from knowgate.history.database import COLUMNS
from knowgate.postgres import Part

WIDEST_INLINE = 1_500  # with its vector in it a row must fit a page of 8 kB
STEPS = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        """CREATE TABLE entries (
            id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            key TEXT NOT NULL, question TEXT NOT NULL, label TEXT NOT NULL, outcome TEXT, source TEXT NOT NULL,
            weight DOUBLE PRECISION NOT NULL, model TEXT NOT NULL, prompts TEXT NOT NULL, tenant TEXT NOT NULL,
            created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION, vector vector NOT NULL,
            UNIQUE (tenant, model, prompts, key, source)
        )""",
        "CREATE INDEX by_scope ON entries (tenant, model, prompts, id)",
    ),
)
HISTORY = Part("history", STEPS, {"meta": frozenset({"key", "value"}), "entries": COLUMNS}, has_vectors=True)
