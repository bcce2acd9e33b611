"""What all workers counted together: each writes what it counted where the others can read it, now and then.

In the place where decisions are kept, so that several machines count together, too; else in a file that the workers of
one server share. Knows nothing of what is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from knowgate.server.decision_log import DecisionLog
from knowgate.server.problems import Problem
from knowgate.server.store import Store

Result = TypeVar("Result")
SERVER, PLACE = (
    "KNOWGATE_SERVER",
    "KNOWGATE_COUNTS",
)  # of the workers of one server, set by who starts them
SOON, LATER = 1.0, 60.0  # seconds until what is new is written, and until it is said that this worker is still there
GONE = 3 * LATER  # seconds after which a worker of another server does not count any more
OLD = 86_400.0
PUT = (
    "INSERT INTO figures VALUES (?, ?, ?, ?) "
    "ON CONFLICT (worker) DO UPDATE SET at = excluded.at, record = excluded.record"
)
OTHERS = "SELECT record FROM figures WHERE worker <> ? AND (server = ? OR at > ?)"
log = logging.getLogger(__name__)


class Together:
    """tell: what this worker counted, as a text. log: where decisions are kept; None where they are not."""

    def __init__(self, tell: Callable[[], str], decisions: DecisionLog | None):
        self._tell = tell
        self._worker = uuid.uuid4().hex
        self._server = os.environ.get(SERVER) or self._worker
        place = os.environ.get(PLACE)
        self._own = DecisionLog(place, keeps_questions=False) if decisions is None and place else None
        self._log = decisions or self._own
        self._planned: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Something new was counted; returns at once."""
        if self._log is not None and (self._planned is None or self._planned.when() > _now() + SOON):
            self._plan(SOON)

    def _plan(self, seconds: float) -> None:
        if self._planned is not None:
            self._planned.cancel()
        self._planned = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._writing = asyncio.get_running_loop().create_task(self.write())
        self._planned = None
        self._plan(LATER)

    async def write(self) -> None:
        row = [self._worker, self._server, time.time(), self._tell()]

        def work(store: Store) -> None:
            with store.writing() as writes:
                writes.execute(PUT, row)
                writes.execute("DELETE FROM figures WHERE at < ?", [time.time() - OLD])

        await self._beside(work, None)

    async def others(self) -> list[str]:
        """What the other workers told: of this server, and of others that are still there."""
        if self._log is None:
            return []
        values = [self._worker, self._server, time.time() - GONE]
        nothing: list[tuple[Any, ...]] = []
        rows = await self._beside(lambda store: store.rows(OTHERS, values), nothing)
        return [str(row[0]) for row in rows]

    async def _beside(self, work: Callable[[Store], Result], instead: Result) -> Result:
        """What fails here is in nobody's way."""
        if self._log is None:
            return instead
        try:
            return await self._log.beside(work)
        except Problem:
            return instead

    async def close(self) -> None:
        """After the last count was told."""
        if self._planned is not None:
            self._planned.cancel()
            await self.write()
        if self._own is not None:
            self._own.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
