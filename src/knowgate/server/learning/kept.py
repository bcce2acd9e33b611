"""Audits and corrections, kept beside the decisions in the same file: a restart forgets neither losses nor alarm.

The table is the truth: every worker reads what the others found out, in the order it was written.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.server.decision_log import DecisionLog

SCHEMA = """
CREATE TABLE IF NOT EXISTS audits (number INTEGER PRIMARY KEY AUTOINCREMENT, decision TEXT NOT NULL, at REAL NOT NULL,
    arm TEXT NOT NULL, scope TEXT NOT NULL, kind TEXT NOT NULL, lost REAL, closed TEXT, opened TEXT);
CREATE INDEX IF NOT EXISTS audits_of ON audits (decision);
CREATE TABLE IF NOT EXISTS corrections (decision TEXT NOT NULL, at REAL NOT NULL, answer TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS corrections_of ON corrections (decision);
"""
LOSS, LABEL, CLEARED = "loss", "label", "cleared"
COLUMNS = "decision, arm, scope, kind, lost, closed, opened"
INSERT = f"INSERT INTO audits ({COLUMNS}, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class Audit:
    """kind: `loss` of a drawn request; `label`, where one that was looked up was also answered from memory; `cleared`,
    where somebody said that the counting begins again. closed, opened: the answers, if their texts may be kept."""

    decision: str
    arm: str
    scope: str
    kind: str
    lost: float | None = None
    closed: str | None = None
    opened: str | None = None


class Kept:
    """The tables. All of SQLite happens in the thread of the decision log."""

    def __init__(self, log: DecisionLog):
        self._log = log
        self._last = 0
        log.begin(_prepare)

    def read(self) -> list[Audit]:
        """All there is, when a server starts."""
        return self._log.begin(self._news)

    async def add(self, audit: Audit) -> list[Audit]:
        """Once this is over it is on disk. Gives back what is new since last time, of other workers, too."""

        def work(file: sqlite3.Connection) -> list[Audit]:
            values = [getattr(audit, name) for name in COLUMNS.split(", ")]
            with file:
                file.execute(INSERT, [*values, time.time()])
            return self._news(file)

        return await self._log.beside(work)

    async def news(self) -> list[Audit]:
        """What other workers found out since last time."""
        return await self._log.beside(self._news)

    def _news(self, file: sqlite3.Connection) -> list[Audit]:
        query = f"SELECT number, {COLUMNS} FROM audits WHERE number > ? ORDER BY number"
        rows = file.execute(query, (self._last,)).fetchall()
        self._last = rows[-1][0] if rows else self._last
        return [Audit(*row[1:]) for row in rows]

    async def correct(self, decision: str, answer: str) -> None:
        def work(file: sqlite3.Connection) -> None:
            with file:
                file.execute("INSERT INTO corrections VALUES (?, ?, ?)", (decision, time.time(), answer))

        await self._log.beside(work)

    async def answers(self, decision: str) -> dict[str, Any]:
        """Both answers of a decision that was audited, as far as their texts were kept."""
        query = "SELECT closed, opened FROM audits WHERE decision = ? AND closed IS NOT NULL ORDER BY number DESC"
        row = await self._log.beside(lambda file: file.execute(query, (decision,)).fetchone())
        return {"closed": row[0], "opened": row[1]} if row else {}


async def forget_texts(log: DecisionLog, ids: Sequence[str]) -> None:
    """Both answers and corrections of these decisions; that something was lost stays counted."""

    def work(file: sqlite3.Connection) -> None:
        _prepare(file)
        with file:
            for id in ids:
                file.execute("UPDATE audits SET closed = NULL, opened = NULL WHERE decision = ?", (id,))
                file.execute("DELETE FROM corrections WHERE decision = ?", (id,))
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # old pages leave the write-ahead file too

    if ids:
        await log.beside(work)


def _prepare(file: sqlite3.Connection) -> None:
    file.executescript(SCHEMA)
