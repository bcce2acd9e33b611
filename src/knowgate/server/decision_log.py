"""What was decided, kept in SQLite (WAL) for those who ask later; with it what people thought of the answers.

Written beside the requests, several in one transaction. Questions are kept only where that is switched on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from knowgate.errors import BadSetting
from knowgate.history import question_key
from knowgate.server.shared_file import open_shared

Result = TypeVar("Result")
SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (id TEXT PRIMARY KEY, at REAL NOT NULL, question TEXT, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS feedback (decision TEXT NOT NULL, at REAL NOT NULL, rating TEXT NOT NULL, comment TEXT);
CREATE INDEX IF NOT EXISTS feedback_of ON feedback (decision);
"""
MOST_WAITING = 10_000  # rows; more than that are dropped rather than kept in memory
log = logging.getLogger(__name__)


class DecisionLog:
    """A file. All of SQLite happens in one thread."""

    def __init__(self, path: Path, *, keeps_questions: bool):
        self.keeps_questions = keeps_questions
        self._waiting: list[tuple[str, float, str | None, str]] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "knowgate-decisions")
        try:
            self._file = self._thread.submit(_open, path).result()
        except (sqlite3.Error, OSError) as error:
            raise BadSetting(f"'{path}' cannot be used as a log of decisions: {error}. Check --decisions.") from None

    def put(self, record: dict[str, Any], question: str | None) -> None:
        """Returns at once."""
        row = (record["id"], time.time(), question if self.keeps_questions else None, json.dumps(record))
        with self._lock:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(row)
            is_first = len(self._waiting) == 1
        if is_first:
            self._thread.submit(self._write)

    def _write(self) -> None:
        with self._lock:
            rows, self._waiting = self._waiting, []
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            log.warning("%d decisions could not be logged: %s", len(rows), error)

    async def find(self, id: str) -> dict[str, Any] | None:
        return await self._beside(lambda: self._find(id))

    def _find(self, id: str) -> dict[str, Any] | None:
        row = self._file.execute("SELECT at, question, record FROM decisions WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        said = self._file.execute("SELECT at, rating, comment FROM feedback WHERE decision = ?", (id,)).fetchall()
        asked = {"question": row[1]} if row[1] is not None else {}
        told = [{"at": at, "rating": rating, "comment": comment} for at, rating, comment in said]
        return {**json.loads(row[2]), "at": row[0], **asked, "feedback": told}

    async def forget(self, *, id: str = "", question: str = "") -> list[str]:
        """Deletes a decision, or all that were made on a question, with what was said of them. Their ids."""
        return await self._beside(lambda: self._forget(id, question))

    def _forget(self, id: str, question: str) -> list[str]:
        rows = self._file.execute("SELECT id, question FROM decisions WHERE id = ? OR question IS NOT NULL", (id,))
        key = question_key(question)
        ids = [row[0] for row in rows if row[0] == id or (question and row[1] and question_key(row[1]) == key)]
        with self._file:
            for one in ids:
                self._file.execute("DELETE FROM decisions WHERE id = ?", (one,))
                self._file.execute("DELETE FROM feedback WHERE decision = ?", (one,))
        self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # old pages leave the write-ahead file too
        return ids

    async def rate(self, id: str, rating: str, comment: str | None) -> bool:
        """False where there is no such decision. Once it is true it is on disk."""
        return await self._beside(lambda: self._rate(id, rating, comment))

    def _rate(self, id: str, rating: str, comment: str | None) -> bool:
        if self._find(id) is None:
            return False
        with self._file:
            self._file.execute("INSERT INTO feedback VALUES (?, ?, ?, ?)", (id, time.time(), rating, comment))
        return True

    async def beside(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Other work on the same file, in its turn."""
        return await self._beside(lambda: work(self._file))

    def begin(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The same, before there is a server."""
        return self._thread.submit(lambda: work(self._file)).result()

    async def _beside(self, work: Callable[[], Result]) -> Result:
        """After all that waits to be written."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Until everything is written."""
        self._thread.submit(self._write)
        self._thread.submit(self._file.close)
        self._thread.shutdown(wait=True)


def _open(path: Path) -> sqlite3.Connection:
    return open_shared(path, SCHEMA, seconds=10, safe=True)
