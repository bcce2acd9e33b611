"""Audits and corrections, kept beside the decisions in the same place: a restart forgets neither losses nor alarm.

The table is the truth: every worker reads what the others found out, in the order it was written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.server.decision_log import DecisionLog
from knowgate.server.store import Store

LOSS, LABEL, CLEARED = "loss", "label", "cleared"
COLUMNS = "decision, arm, scope, kind, lost, closed, opened"
TURN = "audits"  # numbers are given in the order in which rows can be seen: who reads on from the last misses none
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
    """The tables. All that is done with them happens in the thread of the decision log."""

    def __init__(self, log: DecisionLog):
        self._log = log
        self._last = 0

    def read(self) -> list[Audit]:
        """All there is, when a server starts."""
        return self._log.begin(self._news)

    async def add(self, audit: Audit) -> list[Audit]:
        """Once this is over it is on disk. Gives back what is new since last time, of other workers, too."""

        def work(store: Store) -> list[Audit]:
            values = [getattr(audit, name) for name in COLUMNS.split(", ")]
            with store.writing(TURN) as writes:
                writes.execute(INSERT, [*values, time.time()])
            return self._news(store)

        return await self._log.beside(work)

    async def news(self) -> list[Audit]:
        """What other workers found out since last time."""
        return await self._log.beside(self._news)

    def _news(self, store: Store) -> list[Audit]:
        query = f"SELECT number, {COLUMNS} FROM audits WHERE number > ? ORDER BY number"
        rows = store.rows(query, (self._last,))
        self._last = rows[-1][0] if rows else self._last
        return [Audit(*row[1:]) for row in rows]

    async def correct(self, decision: str, answer: str) -> None:
        def work(store: Store) -> None:
            with store.writing() as writes:
                writes.execute("INSERT INTO corrections VALUES (?, ?, ?)", (decision, time.time(), answer))

        await self._log.beside(work)

    async def answers(self, decision: str) -> dict[str, Any]:
        """Both answers of a decision that was audited, as far as their texts were kept."""
        query = "SELECT closed, opened FROM audits WHERE decision = ? AND closed IS NOT NULL ORDER BY number DESC"
        rows = await self._log.beside(lambda store: store.rows(query, (decision,)))
        return {"closed": rows[0][0], "opened": rows[0][1]} if rows else {}


async def forget_texts(log: DecisionLog, ids: Sequence[str]) -> None:
    """Both answers and corrections of these decisions; that something was lost stays counted."""

    def work(store: Store) -> None:
        with store.writing() as writes:
            for id in ids:
                writes.execute("UPDATE audits SET closed = NULL, opened = NULL WHERE decision = ?", (id,))
                writes.execute("DELETE FROM corrections WHERE decision = ?", (id,))
        store.wipe(["audits", "corrections"])

    if ids:
        await log.beside(work)
