"""Exchange of statistics and deletions between the processes of a server."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from knowgate.data.history.entries import question_key
from knowgate.server.database import WRITE_LOCK, Store
from knowgate.server.json_api import ApiError
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.deletions import MAX_DELETIONS_PER_OWNER, Deletion, DeletionIndex
from knowgate.server.telemetry.snapshot import MetricsSnapshot

# Environment variables that the parent process sets for the workers.
SERVER_ID_VARIABLE, COUNTS_FILE_VARIABLE = "KNOWGATE_SERVER", "KNOWGATE_COUNTS"
WRITE_DELAY_SECONDS, RETRY_SECONDS, HEARTBEAT_SECONDS = 1.0, 5.0, 60.0
READ_SECONDS = 2.0  # maximum time to read the statistics of other processes, for which health checks may wait
WORKER_TIMEOUT_SECONDS = 3 * HEARTBEAT_SECONDS  # a process that has not written for this long is considered gone
MAX_SNAPSHOT_AGE_SECONDS = 86_400.0
UPSERT_SNAPSHOT = (
    "INSERT INTO figures VALUES (?, ?, ?, ?) "
    "ON CONFLICT (worker) DO UPDATE SET at = excluded.at, record = excluded.record"
)
DELETE_OLD_SNAPSHOTS = "DELETE FROM figures WHERE at < ? AND server NOT IN (SELECT server FROM figures WHERE at >= ?)"
# Workers of the same server count even after they have ended, other servers only while they write.
SELECT_OTHER_SNAPSHOTS = "SELECT record, at FROM figures WHERE worker <> ? AND (server = ? OR at > ?)"


class SnapshotExchange:
    """Exchange of statistics and deletions between server processes through tables.

    The tables are in the decision log, or in a temporary file.

    Args:
        serialize: Function that returns the statistics of this process as JSON.
        decisions: The decision log, if there is one.
    """

    def __init__(self, serialize: Callable[[], str], decisions: DecisionLog | None):
        self._serialize = serialize
        self._worker_id = uuid.uuid4().hex
        self._server_id = os.environ.get(SERVER_ID_VARIABLE) or self._worker_id
        file = os.environ.get(COUNTS_FILE_VARIABLE)
        self._temporary_log = DecisionLog(file, stores_questions=False) if decisions is None and file else None
        self._log = decisions or self._temporary_log
        self._deletions = DeletionIndex(max_per_owner=MAX_DELETIONS_PER_OWNER)
        self._timer: asyncio.TimerHandle | None = None
        self._write_task: asyncio.Task[None] | None = None

    def schedule_write(self) -> None:
        """Schedule a write of the statistics in WRITE_DELAY_SECONDS. An earlier scheduled write stays."""
        if self._log is None:
            return
        latest = asyncio.get_running_loop().time() + WRITE_DELAY_SECONDS
        if self._timer is None or self._timer.when() > latest:
            self._set_timer(WRITE_DELAY_SECONDS)

    def _set_timer(self, seconds: float) -> None:
        """Schedule the next write. It replaces a write that is already scheduled."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start_write)

    def _start_write(self) -> None:
        """Write the statistics in the background, and schedule the next write.

        Writes show that this process is alive.
        """
        self._write_task = asyncio.get_running_loop().create_task(self._write())
        self._set_timer(HEARTBEAT_SECONDS)

    async def _write(self) -> None:
        """Write the statistics of this process. Delete rows of servers that ended a day ago."""
        now = time.time()
        row = [self._worker_id, self._server_id, now, self._serialize()]
        deletion = (DELETE_OLD_SNAPSHOTS, [now - MAX_SNAPSHOT_AGE_SECONDS] * 2)
        if self._log is not None:
            try:
                await self._log.execute((UPSERT_SNAPSHOT, row), deletion)
            except ApiError:  # the decision log has already logged the error
                self._set_timer(RETRY_SECONDS)

    async def read_others(self) -> list[str]:
        """Return the statistics of other server processes as JSON, or [] after a failure."""
        if self._log is None:
            return []
        oldest = time.time() - WORKER_TIMEOUT_SECONDS
        values = [self._worker_id, self._server_id, oldest]
        try:
            async with asyncio.timeout(READ_SECONDS):
                rows = await self._log.run(lambda store: store.fetch_rows(SELECT_OTHER_SNAPSHOTS, values))
        except (ApiError, TimeoutError):
            return []
        return [str(record) if at > oldest else _drop_times(str(record)) for record, at in rows]

    async def share_deletion(self, question: str, owner: str | None) -> None:
        """Record that a client deletes a question, for all workers. A decision log does this itself."""
        if self._temporary_log is not None:
            await self._temporary_log.delete(question=question, owner=owner)
        elif self._log is None:
            self._deletions.add([Deletion(time.time(), "", question_key(question), owner)])

    async def read_deletions(self) -> DeletionIndex:
        """Return the deletions by clients of all server processes. After a failure, the newest ones are missing."""
        if self._log is not None:
            with suppress(ApiError, TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    await self._log.run(self._deletions.read_new)
        return self._deletions

    async def close(self) -> None:
        """Write the final statistics, and close the temporary file, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            await self._write()
            self._timer.cancel()  # that of another attempt
            if self._log is not None and self._server_id != self._worker_id:
                with suppress(ApiError):  # already logged; then the row of this worker stays
                    await self._log.run(self._merge_row)
        if self._temporary_log is not None:
            self._temporary_log.close()

    def _merge_row(self, store: Store) -> None:
        """Add the row of this worker to the one of all ended workers of its server, so that reloads do not add rows."""
        ended_id = f"{self._server_id}-ended"
        with store.transaction(WRITE_LOCK) as transaction:
            rows = transaction.execute("SELECT record FROM figures WHERE worker = ?", (ended_id,)).fetchall()
            ended = MetricsSnapshot.model_validate_json(self._serialize()).combine([str(row[0]) for row in rows])
            ended.drop_times()
            transaction.execute(UPSERT_SNAPSHOT, (ended_id, self._server_id, time.time(), ended.model_dump_json()))
            transaction.execute("DELETE FROM figures WHERE worker = ?", (self._worker_id,))


def _drop_times(serialized: str) -> str:
    """Return the statistics of a process that has ended without the durations, which are no longer the latest ones."""
    with suppress(ValueError):
        snapshot = MetricsSnapshot.model_validate_json(serialized)
        snapshot.drop_times()
        return snapshot.model_dump_json()
    return serialized
