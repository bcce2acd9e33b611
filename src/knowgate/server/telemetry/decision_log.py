"""The decision log, which stores decisions and feedback in a file or database, and the recent decisions in memory."""

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
from knowgate.server.database import DECISION_TABLES, STORE_ERRORS, Store, open_store
from knowgate.server.json_api import ApiError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
UPSERT_DECISION = (
    "INSERT INTO decisions VALUES (?, ?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET at = excluded.at, question = excluded.question, record = excluded.record"
)
LOCK_TIMEOUT_SECONDS = 10.0
MAX_PENDING_ROWS = 10_000  # if more rows wait, new ones are dropped, so that a slow disk does not fill the memory
MAX_RECENT_DECISIONS = 500


class DecisionLog:
    """Stores decisions and feedback in a file or database.

    A single background thread does all reading and writing. Decisions are written in batches, and requests do not wait
    for that.

    Args:
        location: Path of an SQLite file, or address of a PostgreSQL database (postgresql://...).
        stores_questions: Whether to store the text of questions.

    Raises:
        BadSetting: The file or database cannot be opened.
    """

    def __init__(self, location: str, *, stores_questions: bool):
        self.stores_questions = stores_questions
        self._pending: list[tuple[str, float, str | None, str]] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "knowgate-decisions")
        try:
            self._store = self._thread.submit(_open_log, location).result()
        except KnowgateError:
            raise
        except STORE_ERRORS as error:
            raise BadSetting(
                f"'{redact_secrets(location)}' cannot be used as a decision log: {error}. "
                "Set `decisions` to a file that the server can write, or to the address of a database."
            ) from None

    def append(self, record: dict[str, Any], question: str | None) -> None:
        """Queue a decision for writing, and return at once.

        If too many decisions are waiting to be written, this one is dropped.
        """
        row = (record["id"], time.time(), question if self.stores_questions else None, json.dumps(record))
        with self._lock:
            if len(self._pending) < MAX_PENDING_ROWS:
                self._pending.append(row)
            is_first = len(self._pending) == 1
        if is_first:  # later rows are written by the same call
            self._thread.submit(self._write_pending)

    def _write_pending(self) -> None:
        """Write all queued decisions in one transaction. If that fails, they are lost, and a warning is logged."""
        with self._lock:
            rows, self._pending = self._pending, []
        try:
            with self._store.transaction() as transaction:
                transaction.executemany(UPSERT_DECISION, rows)
        except STORE_ERRORS as error:
            log.warning("%d decisions could not be logged: %s", len(rows), error)

    async def find(self, id: str) -> dict[str, Any] | None:
        """Return a decision with its feedback, or None if there is no such decision."""
        return await self.run(lambda store: _find_decision(store, id))

    async def list_newest(self, count: int, since: float) -> list[dict[str, Any]]:
        """Return up to `count` decisions of all server processes since a time (seconds since 1970), newest first."""
        query = "SELECT at, question, record FROM decisions WHERE at >= ? ORDER BY at DESC LIMIT ?"
        rows = await self.run(lambda store: store.fetch_rows(query, (since, count)))
        return [_to_decision(*row) for row in rows]

    async def find_missing(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that are not in the log, for example because the decisions were deleted."""
        query = f"SELECT id FROM decisions WHERE id IN ({', '.join('?' * len(ids))})"
        rows = await self.run(lambda store: store.fetch_rows(query, ids)) if ids else []
        return sorted(set(ids) - {row[0] for row in rows})

    async def delete(self, *, id: str = "", question: str = "") -> list[str]:
        """Delete the decision with this id, and all decisions on this question, with their feedback.

        Questions that differ only in case, punctuation or articles count as the same.

        Returns:
            The ids of the deleted decisions.
        """
        return await self.run(lambda store: _delete_decisions(store, id, question))

    async def add_feedback(self, id: str, rating: str, comment: str | None) -> bool:
        """Store feedback on a decision, and return True. Returns False if there is no such decision."""

        def insert(store: Store) -> bool:
            # Both steps run in one job. Otherwise the decision could be deleted in between, and the comment would stay.
            if _find_decision(store, id) is None:
                return False
            with store.transaction() as transaction:
                transaction.execute("INSERT INTO feedback VALUES (?, ?, ?, ?)", (id, time.time(), rating, comment))
            return True

        return await self.run(insert)

    async def run(self, work: Callable[[Store], Result]) -> Result:
        """Run a function on the tables, in the background thread and after all pending writes.

        Raises:
            ApiError: 503 if the store is unavailable.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._store))
        except STORE_ERRORS as error:
            log.warning("The decision log is unavailable: %s", error)
            raise ApiError(
                503, "the decision log of the server is unavailable. Try again later.", "log_down"
            ) from error

    async def execute(self, *statements: tuple[str, Sequence[Any]], vacuum: Sequence[str] = ()) -> None:
        """Run SQL statements in one transaction.

        Args:
            statements: SQL statements with their parameters.
            vacuum: Tables from which deleted rows are removed physically afterwards.

        Raises:
            ApiError: 503 if the store is unavailable.
        """

        def run(store: Store) -> None:
            with store.transaction() as transaction:
                for query, values in statements:
                    transaction.execute(query, values)
            if vacuum:
                store.vacuum(vacuum)

        await self.run(run)

    def run_blocking(self, work: Callable[[Store], Result]) -> Result:
        """Run a function on the tables and wait for it. For use before the event loop has started."""
        return self._thread.submit(lambda: work(self._store)).result()

    def close(self) -> None:
        """Write pending decisions and close the store."""
        self._thread.submit(self._write_pending)
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def _open_log(location: str) -> Store:
    """Open the tables of the decision log, and create them if they are missing."""
    return open_store(location, DECISION_TABLES, lock_timeout=LOCK_TIMEOUT_SECONDS, is_durable=True)


def _to_decision(at: float, question: str | None, record: str) -> dict[str, Any]:
    """Convert a row of the table of decisions to a JSON object."""
    return {**json.loads(record), "at": at, **({} if question is None else {"question": question})}


def _find_decision(store: Store, id: str) -> dict[str, Any] | None:
    """Return the decision with this id, and its feedback, or None if there is no such decision."""
    rows = store.fetch_rows("SELECT at, question, record FROM decisions WHERE id = ?", (id,))
    if not rows:
        return None
    feedback = [
        {"at": at, "rating": rating, "comment": comment}
        for at, rating, comment in store.fetch_rows(
            "SELECT at, rating, comment FROM feedback WHERE decision = ?", (id,)
        )
    ]
    return {**_to_decision(*rows[0]), "feedback": feedback}


def _delete_decisions(store: Store, id: str, question: str) -> list[str]:
    """Delete the decision with this id and all decisions on this question, and return their ids.

    Only decisions with a stored question can be found by it. An empty id or question matches nothing.
    """
    rows = store.fetch_rows("SELECT id, question FROM decisions WHERE id = ? OR question IS NOT NULL", (id,))
    key = question_key(question)
    ids = [row[0] for row in rows if row[0] == id or (question and row[1] and question_key(row[1]) == key)]
    with store.transaction() as transaction:
        for decision_id in ids:
            transaction.execute("DELETE FROM decisions WHERE id = ?", (decision_id,))
            transaction.execute("DELETE FROM feedback WHERE decision = ?", (decision_id,))
    store.vacuum(["decisions", "feedback"] if ids else [])
    return ids


class RecentDecisions:
    """Keeps the newest decisions of this process in memory.

    Args:
        stores_texts: Whether to keep the texts of questions and answers.
        max_size: Maximum number of decisions. Older ones are dropped.
    """

    def __init__(self, *, stores_texts: bool, max_size: int = MAX_RECENT_DECISIONS):
        self.stores_texts = stores_texts
        self._max_size = max_size
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def append(self, record: Mapping[str, Any], question: str | None) -> None:
        """Add a decision, and drop the oldest ones if there are too many."""
        text = {"question": question} if self.stores_texts else {}
        self._rows[record["id"]] = {**record, "at": time.time(), **text}
        while len(self._rows) > self._max_size:
            self._rows.popitem(last=False)

    def update(self, id: str, fields: Mapping[str, Any]) -> None:
        """Add fields to a decision. Does nothing if the decision is no longer in memory.

        Args:
            id: Id of the decision.
            fields: The answers without and with passages (`closed`, `opened`), whether they differ (`lost`), or a
                `rating`. Answers are dropped if texts may not be stored. Fields that are None are ignored.
        """
        if id in self._rows:
            self._rows[id] |= {
                name: value
                for name, value in fields.items()
                if value is not None and (self.stores_texts or name in ("lost", "rating"))
            }

    def find(self, id: str) -> dict[str, Any] | None:
        return self._rows.get(id)

    def delete(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._rows.pop(id, None)

    def list_newest(self, count: int) -> list[dict[str, Any]]:
        """Return up to `count` decisions, newest first."""
        return list(reversed(self._rows.values()))[:count]
