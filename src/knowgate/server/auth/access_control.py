"""Who may come in: holders of a key, where there are keys; else programs of this machine, but no web pages in them.

A browser sends `Origin` with what a page of another site asks for; that is refused, and no header allows it (CORS is
closed). Without keys a `Host` that is not this machine's is refused, too: a page whose name was made to point here.
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
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from knowgate.errors import KnowgateError
from knowgate.server.auth.api_keys import ApiKey, match_key, read_keys
from knowgate.server.database import STORE_ERRORS, Store, Transaction, open_store
from knowgate.server.json_api import ApiError
from knowgate.server.options import LOOPBACK_HOSTS, ServeOptions
from knowgate.server.streaming import EventStreamResponse, guess_total_tokens, read_total_tokens

PUBLIC_PATHS = ("/health", "/ready")


class AccessPolicy:
    """Reads the keys again when their file changes, so that a revoked one is refused at once."""

    def __init__(self, options: ServeOptions):
        self.file = None if options.keys is None else Path(options.keys).expanduser()
        self.is_local = options.is_local
        self._keys: tuple[ApiKey, ...] = ()
        self._state: tuple[int, int] | None = None

    def check(self, request: Request) -> ApiKey | None:
        """Whose key it is, where there are keys; raises for who may not come in."""
        if request.scope["path"] in PUBLIC_PATHS:
            return None
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError(403, "pages of other sites are not answered.", "cross_origin")
        if self.file is not None:
            return self._check_key(request.headers.get("authorization", ""))
        if self.is_local and urlsplit(f"//{host}").hostname not in LOOPBACK_HOSTS:
            raise ApiError(403, "without API keys only this machine is answered, by its own name.", "wrong_host")
        return None

    def _check_key(self, given: str) -> ApiKey:
        kind, _, key = given.partition(" ")
        found = match_key(self._read(), key.strip())
        if kind.lower() != "bearer" or found is None:
            raise ApiError(401, "this server wants an API key: Authorization: Bearer KEY.", "invalid_api_key")
        return found

    def _read(self) -> tuple[ApiKey, ...]:
        assert self.file is not None
        try:
            stat = self.file.stat()
            if (state := (stat.st_mtime_ns, stat.st_size)) != self._state:
                self._keys, self._state = read_keys(self.file), state
        except (OSError, KnowgateError):
            raise ApiError(503, "the API keys cannot be read.", "keys_unreadable") from None
        return self._keys


Result = TypeVar("Result")
HTTP_OK = 200
METERED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MINUTE_SECONDS, DAY_SECONDS = 60.0, 86_400
LOCK_TIMEOUT_SECONDS = 1.0  # seconds for another worker's turn
BACKOFF_SECONDS = 10.0  # seconds for which a place that could not be used is left alone
USAGE_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    key TEXT PRIMARY KEY, until REAL NOT NULL, day INTEGER NOT NULL, tokens INTEGER NOT NULL
)
"""
UPSERT_USAGE = (
    "INSERT INTO used VALUES (?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET until = excluded.until, day = excluded.day, tokens = excluded.tokens"
)
log = logging.getLogger(__name__)


class RateLimiter:
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
            async with asyncio.timeout(LOCK_TIMEOUT_SECONDS):
                await self._beside(lambda: self._admit(key))
        except STORE_ERRORS as error:
            self._rests_until = time.monotonic() + BACKOFF_SECONDS
            log.warning("Limits of keys are not held: %s", str(error) or "it takes too long")

    def _admit(self, key: ApiKey) -> None:
        now = self._clock()
        with self._opened().writing(key.hash) as store:
            until, tokens = self._read(store, key, now)
            if key.budget is not None and tokens >= key.budget:
                raise _refusal(
                    "the tokens of this key are used up for today (UTC)", "budget", DAY_SECONDS - now % DAY_SECONDS
                )
            if key.rate is not None:
                until = max(until, now) + MINUTE_SECONDS / key.rate
                if until - now > MINUTE_SECONDS:
                    raise _refusal(f"this key may ask {key.rate} times a minute", "rate", until - now - MINUTE_SECONDS)
            self._write(store, key, until, now, tokens)

    async def spend(self, key: ApiKey, request: Request, response: Response) -> None:
        """What an answer took, now that all of it was sent."""
        tokens = count_tokens(request, response)
        if key.budget is None or tokens < 1:
            return
        try:
            await self._beside(lambda: self._spend(key, tokens))
        except STORE_ERRORS as error:
            log.warning("Tokens of a key could not be counted: %s", error)

    def _spend(self, key: ApiKey, tokens: int) -> None:
        now = self._clock()
        with self._opened().writing(key.hash) as store:
            until, before = self._read(store, key, now)
            self._write(store, key, until, now, before + tokens)

    def _read(self, store: Transaction, key: ApiKey, now: float) -> tuple[float, int]:
        """Until when its requests fill the time (one fills a minute / rate), and its tokens of today."""
        row = store.execute("SELECT until, day, tokens FROM used WHERE key = ?", (key.hash,)).fetchone()
        if row is None:
            return 0.0, 0
        return row[0], row[2] if row[1] == int(now // DAY_SECONDS) else 0

    def _write(self, store: Transaction, key: ApiKey, until: float, now: float, tokens: int) -> None:
        store.execute(UPSERT_USAGE, (key.hash, until, int(now // DAY_SECONDS), tokens))

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self.where, USAGE_SCHEMA, seconds=LOCK_TIMEOUT_SECONDS, safe=False)
        return self._store

    async def _beside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Until everything is counted."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def count_tokens(request: Request, response: Response) -> int:
    """Of the upstream or the model; what is refused, decided or looked up takes none."""
    if response.status_code != HTTP_OK or request.scope["path"] not in METERED_PATHS:
        return 0
    asked = request.headers.get("content-length", "")
    size = int(asked[:12]) if asked.isdigit() else 0
    if isinstance(response, EventStreamResponse):
        return response.tokens or guess_total_tokens(size, events=response.events)
    body = bytes(response.body)
    return read_total_tokens(body) or guess_total_tokens(size, len(body))


def _refusal(words: str, code: str, seconds: float) -> ApiError:
    wait = max(1, math.ceil(seconds))
    return ApiError(429, f"{words}; try again in {wait} seconds.", code, {"retry-after": str(wait)})
