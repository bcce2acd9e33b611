"""How much a key may ask: requests a minute and tokens a day, counted where all workers share: a file or a database.

Knows keys by their hash. What cannot be used now counts nothing and stops nobody: limits are no reason to fail.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from knowgate.server.keys import ApiKey
from knowgate.server.problems import Problem
from knowgate.server.store import TROUBLE, Store, Writes, open_store
from knowgate.server.streaming import Streamed
from knowgate.server.tokens import guessed, said

Result = TypeVar("Result")
OK = 200
COSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MINUTE, DAY = 60.0, 86_400
PATIENCE = 1.0  # seconds for another worker's turn
REST = 10.0  # seconds for which a place that could not be used is left alone
SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    key TEXT PRIMARY KEY, until REAL NOT NULL, day INTEGER NOT NULL, tokens INTEGER NOT NULL
)
"""
PUT = (
    "INSERT INTO used VALUES (?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET until = excluded.until, day = excluded.day, tokens = excluded.tokens"
)
log = logging.getLogger(__name__)


class Meter:
    """Of the keys in one file; what they used stands beside it, or in a database.

    database: postgresql://... clock: seconds since 1970, the same for all workers.
    """

    def __init__(self, keys: Path, clock: Callable[[], float] = time.time, *, database: str | None = None):
        self.where = database or str(keys.with_name(f"{keys.name}.used.db"))
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "knowgate-limits")
        self._store: Store | None = None
        self._rests_until = 0.0

    async def admit(self, key: ApiKey) -> None:
        """Counts a request; raises where it is one too many, or where the day's tokens are used up."""
        if key.rate is None and key.budget is None:
            return
        if time.monotonic() < self._rests_until:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await self._beside(lambda: self._admit(key))
        except TROUBLE as error:
            self._rests_until = time.monotonic() + REST
            log.warning("Limits of keys are not held: %s", str(error) or "it takes too long")

    def _admit(self, key: ApiKey) -> None:
        now = self._clock()
        with self._opened().writing(key.hash) as store:
            until, tokens = self._read(store, key, now)
            if key.budget is not None and tokens >= key.budget:
                raise _refusal("the tokens of this key are used up for today (UTC)", "budget", DAY - now % DAY)
            if key.rate is not None:
                until = max(until, now) + MINUTE / key.rate
                if until - now > MINUTE:
                    raise _refusal(f"this key may ask {key.rate} times a minute", "rate", until - now - MINUTE)
            self._write(store, key, until, now, tokens)

    async def spend(self, key: ApiKey, request: Request, response: Response) -> None:
        """What an answer took, now that all of it was sent."""
        tokens = tokens_of(request, response)
        if key.budget is None or tokens < 1:
            return
        try:
            await self._beside(lambda: self._spend(key, tokens))
        except TROUBLE as error:
            log.warning("Tokens of a key could not be counted: %s", error)

    def _spend(self, key: ApiKey, tokens: int) -> None:
        now = self._clock()
        with self._opened().writing(key.hash) as store:
            until, before = self._read(store, key, now)
            self._write(store, key, until, now, before + tokens)

    def _read(self, store: Writes, key: ApiKey, now: float) -> tuple[float, int]:
        """Until when its requests fill the time (one fills a minute / rate), and its tokens of today."""
        row = store.execute("SELECT until, day, tokens FROM used WHERE key = ?", (key.hash,)).fetchone()
        if row is None:
            return 0.0, 0
        return row[0], row[2] if row[1] == int(now // DAY) else 0

    def _write(self, store: Writes, key: ApiKey, until: float, now: float, tokens: int) -> None:
        store.execute(PUT, (key.hash, until, int(now // DAY), tokens))

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self.where, SCHEMA, seconds=PATIENCE, safe=False)
        return self._store

    async def _beside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Until everything is counted."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def tokens_of(request: Request, response: Response) -> int:
    """Of the upstream or the model; what is refused, decided or looked up takes none."""
    if response.status_code != OK or request.scope["path"] not in COSTS:
        return 0
    asked = request.headers.get("content-length", "")
    size = int(asked[:12]) if asked.isdigit() else 0
    if isinstance(response, Streamed):
        return response.tokens or guessed(size, events=response.events)
    body = bytes(response.body)
    return said(body) or guessed(size, len(body))


def _refusal(words: str, code: str, seconds: float) -> Problem:
    wait = max(1, math.ceil(seconds))
    return Problem(429, f"{words}; try again in {wait} seconds.", code, {"retry-after": str(wait)})
