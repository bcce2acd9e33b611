"""What was decided, kept in a file or a database for those who ask later; with it what people thought of the answers.

Written beside the requests, several in one transaction. Questions are kept only where that is switched on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from knowgate.core.redaction import redact_secrets
from knowgate.data.history.entries import question_key
from knowgate.errors import BadSetting, KnowgateError
from knowgate.server.database import STORE_ERRORS, Store, open_store
from knowgate.server.json_api import ApiError

Result = TypeVar("Result")
DECISION_LOG_SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (id TEXT PRIMARY KEY, at REAL NOT NULL, question TEXT, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS figures (
    worker TEXT PRIMARY KEY, server TEXT NOT NULL, at REAL NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS feedback (decision TEXT NOT NULL, at REAL NOT NULL, rating TEXT NOT NULL, comment TEXT);
CREATE INDEX IF NOT EXISTS decisions_at ON decisions (at);
CREATE INDEX IF NOT EXISTS feedback_of ON feedback (decision);
CREATE TABLE IF NOT EXISTS audits (number INTEGER PRIMARY KEY AUTOINCREMENT, decision TEXT NOT NULL, at REAL NOT NULL,
    arm TEXT NOT NULL, scope TEXT NOT NULL, kind TEXT NOT NULL, lost REAL, closed TEXT, opened TEXT);
CREATE INDEX IF NOT EXISTS audits_of ON audits (decision);
CREATE TABLE IF NOT EXISTS corrections (decision TEXT NOT NULL, at REAL NOT NULL, answer TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS corrections_of ON corrections (decision);
"""
UPSERT_DECISION = (
    "INSERT INTO decisions VALUES (?, ?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET at = excluded.at, question = excluded.question, record = excluded.record"
)
LOCK_TIMEOUT_SECONDS = 10.0  # seconds for another worker's turn
MAX_PENDING_ROWS = 10_000  # rows; more than that are dropped rather than kept in memory
log = logging.getLogger(__name__)


class DecisionLog:
    """where: a file or postgresql://... All that is done with it happens in one thread."""

    def __init__(self, where: str, *, keeps_questions: bool):
        self.keeps_questions = keeps_questions
        self._waiting: list[tuple[str, float, str | None, str]] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "knowgate-decisions")
        try:
            self._store = self._thread.submit(_open, where).result()
        except KnowgateError:
            raise
        except STORE_ERRORS as error:
            shown = redact_secrets(where)
            raise BadSetting(f"'{shown}' cannot be used as a log of decisions: {error}. Check --decisions.") from None

    def put(self, record: dict[str, Any], question: str | None) -> None:
        """Returns at once."""
        row = (record["id"], time.time(), question if self.keeps_questions else None, json.dumps(record))
        with self._lock:
            if len(self._waiting) < MAX_PENDING_ROWS:
                self._waiting.append(row)
            is_first = len(self._waiting) == 1
        if is_first:
            self._thread.submit(self._write)

    def _write(self) -> None:
        with self._lock:
            rows, self._waiting = self._waiting, []
        try:
            with self._store.writing() as store:
                store.executemany(UPSERT_DECISION, rows)
        except STORE_ERRORS as error:
            log.warning("%d decisions could not be logged: %s", len(rows), error)

    async def find(self, id: str) -> dict[str, Any] | None:
        return await self._beside(lambda: self._find(id))

    def _find(self, id: str) -> dict[str, Any] | None:
        rows = self._store.rows("SELECT at, question, record FROM decisions WHERE id = ?", (id,))
        if not rows:
            return None
        row, said = rows[0], self._store.rows("SELECT at, rating, comment FROM feedback WHERE decision = ?", (id,))
        asked = {"question": row[1]} if row[1] is not None else {}
        told = [{"at": at, "rating": rating, "comment": comment} for at, rating, comment in said]
        return {**json.loads(row[2]), "at": row[0], **asked, "feedback": told}

    async def newest(self, count: int, since: float) -> list[dict[str, Any]]:
        """The newest decisions, of all workers."""
        query = "SELECT at, question, record FROM decisions WHERE at >= ? ORDER BY at DESC LIMIT ?"
        rows = await self._beside(lambda: self._store.rows(query, (since, count)))
        return [{**json.loads(row[2]), "at": row[0], **({"question": row[1]} if row[1] else {})} for row in rows]

    async def missing(self, ids: Sequence[str]) -> list[str]:
        """Those that are not kept, or not any more."""
        query = f"SELECT id FROM decisions WHERE id IN ({', '.join('?' * len(ids))})"
        rows = await self._beside(lambda: self._store.rows(query, ids)) if ids else []
        return sorted(set(ids) - {row[0] for row in rows})

    async def forget(self, *, id: str = "", question: str = "") -> list[str]:
        """Deletes a decision, or all that were made on a question, with what was said of them. Their ids."""
        return await self._beside(lambda: self._forget(id, question))

    def _forget(self, id: str, question: str) -> list[str]:
        rows = self._store.rows("SELECT id, question FROM decisions WHERE id = ? OR question IS NOT NULL", (id,))
        key = question_key(question)
        ids = [row[0] for row in rows if row[0] == id or (question and row[1] and question_key(row[1]) == key)]
        with self._store.writing() as store:
            for one in ids:
                store.execute("DELETE FROM decisions WHERE id = ?", (one,))
                store.execute("DELETE FROM feedback WHERE decision = ?", (one,))
        self._store.wipe(["decisions", "feedback"] if ids else [])
        return ids

    async def rate(self, id: str, rating: str, comment: str | None) -> bool:
        """False where there is no such decision. Once it is true it is on disk."""
        return await self._beside(lambda: self._rate(id, rating, comment))

    def _rate(self, id: str, rating: str, comment: str | None) -> bool:
        if self._find(id) is None:
            return False
        with self._store.writing() as store:
            store.execute("INSERT INTO feedback VALUES (?, ?, ?, ?)", (id, time.time(), rating, comment))
        return True

    async def beside(self, work: Callable[[Store], Result]) -> Result:
        """Other work on the same tables, in its turn."""
        return await self._beside(lambda: work(self._store))

    def begin(self, work: Callable[[Store], Result]) -> Result:
        """The same, before there is a server."""
        return self._thread.submit(lambda: work(self._store)).result()

    async def _beside(self, work: Callable[[], Result]) -> Result:
        """After all that waits to be written."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except STORE_ERRORS as error:
            log.warning("The log of decisions cannot be used: %s", error)
            raise ApiError(503, "the log of decisions cannot be used at the moment.", "log_down") from error

    def close(self) -> None:
        """Until everything is written."""
        self._thread.submit(self._write)
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def _open(where: str) -> Store:
    return open_store(where, DECISION_LOG_SCHEMA, seconds=LOCK_TIMEOUT_SECONDS, safe=True)


MAX_RECENT_DECISIONS = 500


class RecentDecisions:
    """keeps_texts: questions and answers, too. The oldest of more than `most` are forgotten."""

    def __init__(self, *, keeps_texts: bool, most: int = MAX_RECENT_DECISIONS):
        self.keeps_texts = keeps_texts
        self._most = most
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def see(self, record: Mapping[str, Any], question: str | None) -> None:
        asked = {"question": question} if self.keeps_texts else {}
        self._rows[record["id"]] = {**record, "at": time.time(), **asked}
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def add(self, id: str, found: Mapping[str, Any]) -> None:
        """More about a request: its answers (`closed`, `opened`), whether they differ (`lost`), a `rating`."""
        kept = {key: value for key, value in found.items() if self.keeps_texts or key in ("lost", "rating")}
        if id in self._rows:
            self._rows[id] |= {key: value for key, value in kept.items() if value is not None}

    def find(self, id: str) -> dict[str, Any] | None:
        return self._rows.get(id)

    def forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._rows.pop(id, None)

    def newest(self, count: int) -> list[dict[str, Any]]:
        return list(self._rows.values())[: -count - 1 : -1]
