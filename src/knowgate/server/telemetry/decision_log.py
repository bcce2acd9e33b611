"""The decision log: decisions and feedback, stored in a file or database; and the most recent ones, in memory."""

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
MAX_PENDING_ROWS = 10_000  # further rows are dropped, so that a slow disk cannot fill the memory
MAX_RECENT_DECISIONS = 500


class DecisionLog:
    """Stores decisions and feedback. A single background thread does all reading and writing.

    Decisions are written in batches and do not delay requests.

    Args:
        location: An SQLite file, or postgresql://...
        stores_questions: Whether to store the text of questions.
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
                f"'{redact_secrets(location)}' cannot be used as a decision log: {error}. Check `decisions`."
            ) from None

    def append(self, record: dict[str, Any], question: str | None) -> None:
        """Queue a decision for writing and return at once."""
        row = (record["id"], time.time(), question if self.stores_questions else None, json.dumps(record))
        with self._lock:
            if len(self._pending) < MAX_PENDING_ROWS:
                self._pending.append(row)
            is_first = len(self._pending) == 1
        if is_first:
            self._thread.submit(self._write_pending)

    def _write_pending(self) -> None:
        """Write all queued decisions in one transaction."""
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
        """Return the newest decisions of all server processes, newest first."""
        query = "SELECT at, question, record FROM decisions WHERE at >= ? ORDER BY at DESC LIMIT ?"
        rows = await self.run(lambda store: store.fetch_rows(query, (since, count)))
        return [_to_decision(*row) for row in rows]

    async def find_missing(self, ids: Sequence[str]) -> list[str]:
        """Return those of the ids that are not, or no longer, in the log."""
        query = f"SELECT id FROM decisions WHERE id IN ({', '.join('?' * len(ids))})"
        rows = await self.run(lambda store: store.fetch_rows(query, ids)) if ids else []
        return sorted(set(ids) - {row[0] for row in rows})

    async def delete(self, *, id: str = "", question: str = "") -> list[str]:
        """Delete one decision, or all decisions on a question, with their feedback.

        Questions that differ only in case, punctuation or articles count as the same.

        Returns:
            The ids of the deleted decisions.
        """
        return await self.run(lambda store: _delete_decisions(store, id, question))

    async def add_feedback(self, id: str, rating: str, comment: str | None) -> bool:
        """Store feedback on a decision durably; return False if there is no such decision."""

        def insert(store: Store) -> bool:
            # One job: a deletion between the check and the insertion would leave a comment behind.
            if _find_decision(store, id) is None:
                return False
            with store.transaction() as transaction:
                transaction.execute("INSERT INTO feedback VALUES (?, ?, ?, ?)", (id, time.time(), rating, comment))
            return True

        return await self.run(insert)

    async def run(self, work: Callable[[Store], Result]) -> Result:
        """Run work on the tables in the background thread, after all pending writes.

        Raises:
            ApiError: 503 if the store is unavailable.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._store))
        except STORE_ERRORS as error:
            log.warning("The decision log is unavailable: %s", error)
            raise ApiError(503, "the decision log is unavailable at the moment.", "log_down") from error

    async def execute(self, *statements: tuple[str, Sequence[Any]], vacuum: Sequence[str] = ()) -> None:
        """Run statements in one transaction, and vacuum tables afterwards."""

        def run(store: Store) -> None:
            with store.transaction() as transaction:
                for query, values in statements:
                    transaction.execute(query, values)
            if vacuum:
                store.vacuum(vacuum)

        await self.run(run)

    def run_blocking(self, work: Callable[[Store], Result]) -> Result:
        """Like `run`, for use before the event loop has started."""
        return self._thread.submit(lambda: work(self._store)).result()

    def close(self) -> None:
        """Write pending decisions and close the store."""
        self._thread.submit(self._write_pending)
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def _open_log(location: str) -> Store:
    return open_store(location, DECISION_TABLES, lock_timeout=LOCK_TIMEOUT_SECONDS, is_durable=True)


def _to_decision(at: float, question: str | None, record: str) -> dict[str, Any]:
    return {**json.loads(record), "at": at, **({} if question is None else {"question": question})}


def _find_decision(store: Store, id: str) -> dict[str, Any] | None:
    """Return a decision with its feedback, or None."""
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
    """Delete the decision with this id and all decisions on this question; return their ids."""
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
    """The newest decisions of this process, in memory.

    Args:
        stores_texts: Whether to keep the texts of questions and answers.
        max_size: Number of decisions; older ones are dropped.
    """

    def __init__(self, *, stores_texts: bool, max_size: int = MAX_RECENT_DECISIONS):
        self.stores_texts = stores_texts
        self._max_size = max_size
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def append(self, record: Mapping[str, Any], question: str | None) -> None:
        text = {"question": question} if self.stores_texts else {}
        self._rows[record["id"]] = {**record, "at": time.time(), **text}
        while len(self._rows) > self._max_size:
            self._rows.popitem(last=False)

    def update(self, id: str, fields: Mapping[str, Any]) -> None:
        """Add answers (`closed`, `opened`), whether they differ (`lost`), or a `rating` to a decision."""
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
        return list(self._rows.values())[: -count - 1 : -1]
