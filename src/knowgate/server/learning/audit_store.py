"""Stores audits in the decision log, and reads those of all server processes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from knowgate.server.database import WRITE_LOCK, Store
from knowgate.server.load_limits import HOUR_SECONDS
from knowgate.server.telemetry.decision_log import READ_SECONDS, DecisionLog

LOSS, LABEL, FAILED, CLEARED = "loss", "label", "failed", "cleared"  # kinds of rows, see `AuditRecord`
AUDIT_COLUMNS = "decision, arm, scope, kind, lost, closed, opened, owner"
# What the statistics need. Audits that were made only for a label do not count, and texts would take gigabytes.
SELECT_RESULTS = (
    "SELECT number, arm, scope, kind, lost, owner FROM audits "
    f"WHERE number > ? AND kind <> '{LABEL}' ORDER BY number LIMIT ?"
)
SELECT_OLDER_NUMBER = f"SELECT number FROM audits WHERE kind <> '{LABEL}' ORDER BY number DESC LIMIT 1 OFFSET ?"
MAX_AUDITS = 200_000  # audits that count when a server starts; more would take minutes
ROWS_AT_ONCE = 500  # audits of other processes that are added to the statistics at once; other requests wait meanwhile
INSERT_AUDIT = f"INSERT INTO audits ({AUDIT_COLUMNS}, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Stored audit. An audit compares the sent answer with the answer with passages.

    Attributes:
        decision: Id of the audited decision.
        arm: Name of the gate in an A/B test: "a" or "b".
        scope: Hash of everything that the result depends on, such as gate, arbiter, LLM and index.
        kind: "loss": counts for the share of changed answers. "label": made only to find out whether the LLM knows the
            question. "failed": has no result. "cleared": not an audit, but a mark that the alarm was cleared.
        lost: 1 if the answer that was sent differs from the answer with passages, otherwise 0. None if unknown.
        closed: The answer without passages, if texts may be stored.
        opened: The answer with passages, if texts may be stored.
        owner: Name of the API key of the request; None in rows of earlier versions.
    """

    decision: str
    arm: str
    scope: str
    kind: str
    lost: float | None = None
    closed: str | None = None
    opened: str | None = None
    owner: str | None = None


class AuditStore:
    """Store of audits in the decision log.

    All server processes share it. An audit compares the answers with and without passages.
    """

    def __init__(self, decisions: DecisionLog):
        self._decisions = decisions
        self._last_number = 0

    def read_all(self) -> list[AuditRecord]:
        """Return the newest MAX_AUDITS stored audits that count. This blocks the event loop: only call it at the start."""
        audits: list[AuditRecord] = []
        rows = self._decisions.run_blocking(lambda store: store.fetch_rows(SELECT_OLDER_NUMBER, (MAX_AUDITS,)))
        self._last_number = rows[0][0] if rows else 0
        while page := self._decisions.run_blocking(self._fetch_new):
            audits += page
        return audits

    def list_recent_ages(self) -> list[float]:
        """Return the age in seconds of each audit of the last hour. This blocks the event loop, as `read_all` does."""
        now = time.time()
        # A row of the kind CLEARED is no audit, but says that an alarm was cleared.
        query, values = "SELECT at FROM audits WHERE at > ? AND kind <> ?", (now - HOUR_SECONDS, CLEARED)
        rows = self._decisions.run_blocking(lambda store: store.fetch_rows(query, values))
        return [max(0.0, now - row[0]) for row in rows]

    async def add(self, audit: AuditRecord) -> list[AuditRecord]:
        """Store an audit, without its texts if its decision was deleted meanwhile.

        Returns:
            The results since the last read: of this audit and of those of other processes, ROWS_AT_ONCE at most.
        """

        def insert(store: Store) -> list[AuditRecord]:
            # With this lock, no process deletes the decision meanwhile. Also, rows become visible in the order of their
            # numbers, so a process that continues after the last number that it has read misses no row.
            with store.transaction(WRITE_LOCK) as transaction:
                row = transaction.execute("SELECT 1 FROM decisions WHERE id = ?", (audit.decision,)).fetchone()
                stored = audit if row is not None else replace(audit, closed=None, opened=None)
                values = [getattr(stored, name) for name in AUDIT_COLUMNS.split(", ")]
                transaction.execute(INSERT_AUDIT, [*values, time.time()])
            return self._fetch_new(store)

        return await self._decisions.run(insert)

    async def check(self) -> None:
        """Read from the decision log. If it does not respond in time, raise an ApiError with status 503."""
        await self._decisions.run(lambda store: store.fetch_rows("SELECT 1"), READ_SECONDS)

    async def is_deleted(self, decision: str) -> bool:
        """Return whether a decision was deleted, so that its question may not be labeled."""
        return bool(await self._decisions.find_missing([decision]))

    async def read_new(self) -> list[AuditRecord]:
        """Return the next audits of all processes since the last read, ROWS_AT_ONCE at most."""
        return await self._decisions.run(self._fetch_new)

    def _fetch_new(self, store: Store) -> list[AuditRecord]:
        """Fetch the next results since the last read, and remember the number of the newest one. Equal texts are shared."""
        rows = store.fetch_rows(SELECT_RESULTS, (self._last_number, ROWS_AT_ONCE))
        self._last_number = rows[-1][0] if rows else self._last_number
        audits = []
        for _, arm, scope, kind, lost, owner in rows:
            arm, scope, kind, owner = (text and sys.intern(text) for text in (arm, scope, kind, owner))
            audits.append(AuditRecord("", arm, scope, kind, lost, owner=owner))
        return audits

    async def find_answers(self, decision: str) -> dict[str, Any]:
        """Return both answers of an audited decision.

        Returns:
            The answers without passages (`closed`) and with passages (`opened`), or an empty object if their texts are
            not stored.
        """
        query = "SELECT closed, opened FROM audits WHERE decision = ? AND closed IS NOT NULL ORDER BY number DESC"
        rows = await self._decisions.run(lambda store: store.fetch_rows(query, (decision,)))
        return {"closed": rows[0][0], "opened": rows[0][1]} if rows else {}
