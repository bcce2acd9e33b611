"""The decision log, which stores decisions and feedback in a file or database."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from knowgate.core.limited_log import LimitedLog
from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.redaction import redact_secrets
from knowgate.data.history.entries import question_key
from knowgate.errors import BadSetting, KnowgateError
from knowgate.server.database import (
    DECISION_MIGRATIONS,
    STORE_ERRORS,
    WRITE_LOCK,
    Store,
    Transaction,
    is_locked,
    open_store,
)
from knowgate.server.json_api import ApiError
from knowgate.server.telemetry.deletions import (
    DAY_SECONDS,
    DELETION_BATCH,
    SELECT_DELETIONS,
    SELECT_UNFINDABLE,
    TABLES_WITH_TEXTS,
    DeletionIndex,
    add_missing_hashes,
    delete_orphaned_feedback,
    delete_rows,
    find_ids,
    mark_unknown_sources,
    record_deletion,
)
from knowgate.server.telemetry.feedback import store_feedback
from knowgate.server.telemetry.trace import find_decision, to_decision, upgrade_records

log = logging.getLogger(__name__)
Result = TypeVar("Result")
UPSERT_DECISION = (
    "INSERT INTO decisions (id, at, question, record, owner, question_key) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET at = excluded.at, question = excluded.question, record = excluded.record"
)
DELETE_SOURCE_QUESTIONS = "DELETE FROM source_questions WHERE decision = ?"
INSERT_SOURCE_QUESTION = "INSERT INTO source_questions (decision, question_key) VALUES (?, ?)"
UPGRADE_DAYS = 7
LOCK_TIMEOUT_SECONDS = 10.0
SHARED_ATTEMPTS, RETRY_SECONDS = 6, 0.1  # to find a decision that another process may be about to write
READ_SECONDS = 5.0  # maximum time for which a client waits for the log before it gets status 503
MIN_COMMIT_SECONDS, MAX_COMMIT_SECONDS = 1.0, 20.0  # limits of the time for which a response waits for the commit
MAX_PENDING_ROWS = 10_000  # if more rows wait, new ones are dropped, so that a slow disk does not fill the memory
MAX_PENDING_BYTES = 64 << 20  # the same for the memory of their texts
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 9.0, 300.0  # before deleted rows are erased again after a failure
MAX_FEEDBACK_PER_DAY = 1000  # per API key


@dataclass(frozen=True)
class DecisionRow:
    """Row of the table of decisions.

    Attributes:
        at: Start of the request, in seconds since 1970.
        question: The question, if its text is stored.
        question_keys: Hashes of the question and of the chat messages from which it was made, if hashes are stored.
    """

    id: str
    at: float
    question: str | None
    record: str
    owner: str
    question_keys: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Size of the texts in memory."""
        return sys.getsizeof(self.record) + sys.getsizeof(self.question)


class DecisionLog:
    """Store of decisions and feedback in a file or database.

    One background thread reads and writes. Decisions that arrive meanwhile are committed together.

    Args:
        location: Path of an SQLite file, or address of a PostgreSQL database (postgresql://...).
        stores_questions: Whether to store the text of questions.
        stores_keys: Whether to store a hash of questions, by which decisions are found, even if the text is not stored.
        retain_days: Age in days after which decisions and all that refers to them are deleted. None keeps them.
        on_loss: Called with a reason and a number of decisions if decisions could not be stored.
        is_shared: Whether other processes write to the same log. A missing decision is then searched for repeatedly.

    Raises:
        BadSetting: The file or database cannot be opened.
    """

    def __init__(
        self,
        location: str,
        *,
        stores_questions: bool,
        stores_keys: bool = False,
        retain_days: float | None = None,
        on_loss: Callable[[str, int], None] = lambda reason, count: None,
        is_shared: bool = False,
    ):
        self.stores_questions, self.stores_keys = stores_questions, stores_questions or stores_keys
        self.lost_count = 0
        self._retain_days = retain_days
        self._on_loss = on_loss
        self._attempts = SHARED_ATTEMPTS if is_shared or is_postgres_address(location) else 1
        self._pending: list[DecisionRow] = []
        self._n_writing = 0  # rows that are being written, which are no longer pending
        self._unwritten_bytes = 0  # of rows that are pending or being written
        self._is_closing, self._is_last_write, self._must_vacuum = False, False, False
        self._vacuum_pause = self._next_vacuum = 0.0
        self._commit: Future[None] = Future()  # completes when the pending rows are written
        self._lock = threading.Lock()
        self._limited_log = LimitedLog(log)
        self._thread = ThreadPoolExecutor(1, "knowgate-decisions")
        try:
            self._store = self._thread.submit(_open_log, location).result()
        except KnowgateError:
            raise
        except STORE_ERRORS as error:
            raise BadSetting(
                f"the decision log '{redact_secrets(location)}' cannot be opened: {error}. Set `decisions` to a writable file "
                "or a database address."
            ) from None

    def append(
        self,
        record: dict[str, Any],
        question: str | None,
        owner: str = "",
        seconds: float = 0.0,
        question_keys: Sequence[str] = (),
    ) -> Future[None]:
        """Queue a decision for writing, and return at once. A full queue loses the decision.

        Args:
            record: The decision, as a JSON object.
            question: The question. Its text is stored only with the option `stores_questions`.
            owner: Name of the API key of the request.
            seconds: Age of the request. The decision is dropped if a client has deleted the decisions on its question
                since the request began.
            question_keys: Hashes of the question and of the messages from which it was made, if it is a follow-up. A
                client can delete the decision by giving any of these texts. Default: the hash of the question.

        Returns:
            A future that completes when the decision is stored. It raises an error if the decision is lost, or if an
            SQLite file is locked for LOCK_TIMEOUT_SECONDS; a later attempt can still store the decision then. Decisions
            that are written together share one future, so do not cancel it.
        """
        text = question if self.stores_questions else None
        keys: tuple[str, ...] = ()
        if self.stores_keys and question is not None:
            keys = tuple(question_keys) or (question_key(question),)
        return self._enqueue(DecisionRow(record["id"], time.time() - seconds, text, json.dumps(record), owner, keys))

    async def wait_for_commit(self, commit: Future[None], seconds_left: float) -> bool:
        """Wait until `append` has stored a decision, and return whether this succeeded before the request's deadline."""
        timeout = min(max(MIN_COMMIT_SECONDS, seconds_left), MAX_COMMIT_SECONDS)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(asyncio.wrap_future(commit))  # other requests may wait for the same future
        except STORE_ERRORS:  # these include TimeoutError
            return False
        return True

    def _enqueue(self, row: DecisionRow) -> Future[None]:
        """Queue a row for writing, and return the future of its commit. A full queue loses the row."""
        with self._lock:
            n_rows = len(self._pending) + self._n_writing
            is_full = n_rows >= MAX_PENDING_ROWS or self._unwritten_bytes >= MAX_PENDING_BYTES
            if not is_full:
                self._pending.append(row)
                self._unwritten_bytes += row.n_bytes
            is_first = len(self._pending) == 1
            commit = self._commit
        if is_full:
            self._count_loss("queue full", 1)
            commit = Future()
            commit.set_exception(KnowgateError("too many decisions are waiting to be written."))
        elif is_first:  # later rows need no call of their own: a write takes all rows that are queued when it starts
            self._thread.submit(self._write_pending)
        return commit

    def _write_pending(self) -> None:
        """Write all queued decisions in one transaction. If the file is locked, try again later."""
        with self._lock:
            rows, self._pending = self._pending, []
            commit, self._commit = self._commit, Future()  # the callers of `append` for these rows have `commit`
            self._n_writing = len(rows)
        if not commit.set_running_or_notify_cancel():
            commit = Future()  # the shared future was cancelled, so set the result of another one, which nobody reads
        try:
            with self._store.transaction(WRITE_LOCK) as transaction:
                _insert_rows(transaction, rows)
        except STORE_ERRORS as error:
            self._handle_failure(rows, error)
            commit.set_exception(error.with_traceback(None))  # it refers to this frame, which has the rows
        else:
            with self._lock:
                self._end_write(rows)
            commit.set_result(None)

    def _write_last(self) -> None:
        """Write the decisions that are still queued when the log is closed."""
        self._is_last_write = True
        self._write_pending()

    def _end_write(self, rows: Sequence[DecisionRow]) -> None:
        """Count these rows as written or lost. The caller holds the lock."""
        self._n_writing = 0
        self._unwritten_bytes -= sum(row.n_bytes for row in rows)

    def _handle_failure(self, rows: list[DecisionRow], error: Exception) -> None:
        """Queue decisions again if the file is locked. After other errors, they are lost and counted."""
        with self._lock:
            is_kept = is_locked(error) and not self._is_last_write
            # Otherwise, newer decisions or `close` have scheduled an attempt.
            needs_attempt = is_kept and not self._pending and not self._is_closing
            self._end_write([] if is_kept else rows)
            if is_kept:
                self._pending[:0] = rows
        if needs_attempt:
            self._thread.submit(self._write_pending)
        if is_kept:
            log.warning("%d decisions wait, because the decision log is locked by another process.", len(rows))
        else:
            self._limited_log.write("%d decisions could not be logged: %s", len(rows), error)
            self._count_loss("write failed", len(rows))

    def _count_loss(self, reason: str, count: int) -> None:
        """Count decisions that could not be stored."""
        with self._lock:
            self.lost_count += count
        self._on_loss(reason, count)

    def delete_expired(self) -> None:
        """Delete what is older than `retain_days`, in the background. Call it once an hour."""
        self._thread.submit(self._delete_expired)

    def _delete_expired(self, earlier_count: int = 0) -> None:
        """Delete a batch of old decisions and queue the next one. After the last one, delete feedback without a decision."""
        try:
            if self._retain_days is not None:
                oldest = time.time() - self._retain_days * DAY_SECONDS
                rows = self._store.fetch_rows("SELECT id FROM decisions WHERE at < ? LIMIT ?", (oldest, DELETION_BATCH))
                delete_rows(self._store, [row[0] for row in rows])
                count = earlier_count + len(rows)
                if len(rows) == DELETION_BATCH:
                    self._thread.submit(self._delete_expired, count)
                    return
                if count:
                    self._must_vacuum = True
                    log.info("%d decisions older than %g days were deleted.", count, self._retain_days)
            if delete_orphaned_feedback(self._store):
                self._must_vacuum = True
        except STORE_ERRORS as error:
            log.warning("Old decisions could not be deleted: %s", error)

    async def find(self, id: str, owner: str | None = None) -> dict[str, Any] | None:
        """Return a decision with its feedback, or None. With `owner`, only decisions of this API key count."""
        return await self._retry(lambda store: find_decision(store, id, owner))

    async def _retry(self, work: Callable[[Store], Result]) -> Result:
        """Run a search repeatedly until it finds something. Another process may be about to write."""
        for _ in range(self._attempts - 1):
            if result := await self.run(work, READ_SECONDS):
                return result
            await asyncio.sleep(RETRY_SECONDS)
        return await self.run(work, READ_SECONDS)

    async def list_newest(self, count: int, since: float) -> list[dict[str, Any]]:
        """Return the newest decisions of all server processes. `since` is in seconds since 1970."""
        query = "SELECT at, question, record FROM decisions WHERE at >= ? ORDER BY at DESC LIMIT ?"
        rows = await self.run(lambda store: store.fetch_rows(query, (since, count)), READ_SECONDS)
        return [to_decision(*row) for row in rows]

    async def find_missing(self, ids: Sequence[str]) -> list[str]:
        """Return the ids missing in the log, for example after a deletion."""
        query = f"SELECT id FROM decisions WHERE id IN ({', '.join('?' * len(ids))})"
        rows = await self.run(lambda store: store.fetch_rows(query, ids)) if ids else []
        return sorted(set(ids) - {row[0] for row in rows})

    async def delete(self, *, id: str = "", question: str = "", owner: str | None = None) -> list[str]:
        """Delete the decisions with this id or question, and return their ids.

        Args:
            id: Id of a decision; empty for none.
            question: A question; empty for none. Only decisions on it, or on a follow-up, that store its hash are found.
            owner: If given, only decisions of this owner are deleted.
        """
        # Another process may be about to write the decision, so wait until it is found. Then search again and delete.
        # Only decisions of the owner are searched for: the time must not tell whether another key asked the question.
        await self._retry(lambda store: find_ids(store, id, question, owner))
        return await asyncio.shield(self._delete(id, question, owner))  # a deadline of the request does not stop it

    async def _delete(self, id: str, question: str, owner: str | None) -> list[str]:
        """Delete decisions in batches, between which other decisions are written. Return the ids.

        Copies of the deleted rows may remain in the file until `erase_deleted` is called.
        """
        ids = await self.run(lambda store: record_deletion(store, id, question, owner))
        for start in range(0, len(ids), DELETION_BATCH):
            await self.run(partial(delete_rows, ids=ids[start : start + DELETION_BATCH]))
        if ids:
            self._must_vacuum = True
            await self.run(lambda store: store.truncate_log())
        return ids

    def erase_deleted(self) -> None:
        """Vacuum the tables in the background, if rows were deleted since they were vacuumed. Call it now and then.

        After a failure, there is no other attempt for a while, because it can hold up other users of a database.
        """
        if self._must_vacuum and (time.monotonic() >= self._next_vacuum or self._is_closing):
            self._must_vacuum = False
            self._thread.submit(self._vacuum)

    def _vacuum(self) -> None:
        """Erase deleted rows from the file or database."""
        is_erased = False
        try:
            is_erased = self._store.vacuum(TABLES_WITH_TEXTS)
        except STORE_ERRORS as error:
            log.warning("Deleted decisions could not be erased from the decision log: %s", error)
        self._vacuum_pause = 0.0 if is_erased else min(2 * self._vacuum_pause + FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        self._next_vacuum = time.monotonic() + self._vacuum_pause
        if not is_erased:
            self._must_vacuum = True

    async def has_unfindable(self, owner: str | None) -> bool:
        """Return whether there are decisions that a deletion by question misses. Owner None means all API keys.

        Either their question was not stored, or an earlier version did not store from which messages it was made.
        """
        owners = {row[0] for row in await self.run(lambda store: store.fetch_rows(SELECT_UNFINDABLE))}
        return bool(owners) if owner is None else owner in owners

    async def add_feedback(
        self, id: str, rating: str, comment: str | None, owner: str = "", correction: str | None = None
    ) -> bool:
        """Store feedback on a decision, and return whether the decision exists. New feedback replaces the old.

        Args:
            id: Id of the decision.
            rating: The rating, "up" or "down".
            comment: A remark on the answer, if there is one.
            owner: Name of the API key that gives the feedback.
            correction: The right answer, if the user knows it. Without it, an earlier correction stays.

        Raises:
            ApiError: 429 if this owner has given too much feedback within a day.
        """
        values = (id, rating, comment, owner, correction)
        return await self.run(lambda store: store_feedback(store, *values, max_per_day=MAX_FEEDBACK_PER_DAY))

    async def run(self, work: Callable[[Store], Result], timeout: float | None = None) -> Result:
        """Run a function on the tables, in the background thread and after all pending writes.

        Args:
            work: The function.
            timeout: Maximum time to wait, in seconds. Only for functions that write nothing, because a function that
                has started is not stopped.

        Raises:
            ApiError: 503 if the store is unavailable, or does not respond in time.
        """
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._store))
        except STORE_ERRORS as error:  # these include TimeoutError, which has no message
            self._limited_log.write("The decision log is unavailable: %s", str(error) or "it does not respond")
            message = "the decision log of the server is unavailable. Try again later."
            raise ApiError(503, message, "log_down") from error

    async def execute(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Run SQL statements with their parameters in one transaction. No decision is deleted meanwhile.

        Raises:
            ApiError: 503 if the store is unavailable.
        """

        def run_all(store: Store) -> None:
            with store.transaction(WRITE_LOCK) as transaction:
                for query, values in statements:
                    transaction.execute(query, values)

        await self.run(run_all)

    def run_blocking(self, work: Callable[[Store], Result]) -> Result:
        """Run a function on the tables and wait for it. For use before the event loop has started."""
        return self._thread.submit(lambda: work(self._store)).result()

    def close(self) -> None:
        """Write pending decisions, erase deleted ones, and close the store. Decisions are lost if the file is still locked."""
        self._is_closing = True
        self._thread.submit(self._write_last)
        self.erase_deleted()
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def _open_log(location: str) -> Store:
    """Open or create the tables of the decision log, and upgrade the rows of earlier versions.

    This reads all rows, so it is not done any more UPGRADE_DAYS after the first time. Until then, a process of an earlier
    version may still write rows.
    """
    store = open_store(location, DECISION_MIGRATIONS, lock_timeout=LOCK_TIMEOUT_SECONDS, is_durable=True)
    upgrade_times = [row[0] for row in store.fetch_rows("SELECT at FROM upgrades")]
    if not upgrade_times or time.time() < upgrade_times[0] + UPGRADE_DAYS * DAY_SECONDS:
        add_missing_hashes(store)
        mark_unknown_sources(store)
        upgrade_records(store)
    if not upgrade_times:
        with store.transaction(WRITE_LOCK) as transaction:
            transaction.execute("INSERT INTO upgrades (at) VALUES (?)", (time.time(),))
    return store


def _insert_rows(transaction: Transaction, rows: Sequence[DecisionRow]) -> None:
    """Insert new decisions with the hashes of their questions, except those that a client has deleted meanwhile."""
    oldest = min((row.at for row in rows), default=time.time())
    index = DeletionIndex(transaction.execute(SELECT_DELETIONS, (oldest,)).fetchall())
    decisions, source_questions = [], []
    for row in rows:
        if not index.covers(row.id, row.question_keys, row.owner, row.at):
            key, *source_keys = row.question_keys or (None,)
            decisions.append((row.id, row.at, row.question, row.record, row.owner, key))
            source_questions += [(row.id, source_key) for source_key in source_keys]
    transaction.executemany(UPSERT_DECISION, decisions)
    # A row may be an update of an earlier one.
    transaction.executemany(DELETE_SOURCE_QUESTIONS, [(id,) for id in sorted({id for id, _ in source_questions})])
    transaction.executemany(INSERT_SOURCE_QUESTION, sorted(set(source_questions)))
