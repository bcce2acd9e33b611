"""Access control: who may send requests, and how many per minute."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from knowgate.errors import KnowgateError
from knowgate.server.auth.api_keys import ApiKey, match_key, read_keys
from knowgate.server.database import RATE_LIMIT_TABLES, STORE_ERRORS, Store, open_store
from knowgate.server.json_api import ApiError
from knowgate.server.options import LOOPBACK_HOSTS, ServeOptions

log = logging.getLogger(__name__)

MINUTE_SECONDS = 60.0
ROUNDING_SECONDS = 1e-3  # more than the rounding error of times, which would cost a key its last request
LOCK_TIMEOUT_SECONDS = 1.0
ADMISSION_TIMEOUT_SECONDS = 5.0  # maximum time to count a request, which may wait for the counts of others
BACKOFF_SECONDS = 1.0  # time in which keys with a rate are rejected after the store of the counters has failed
UPSERT_USAGE = (
    "INSERT INTO used (key, until, day, tokens) VALUES (?, ?, 0, 0) "
    "ON CONFLICT (key) DO UPDATE SET until = excluded.until"
)


class AccessPolicy:
    """Decides which requests are allowed.

    If the server has a key file, a request needs a valid API key. The file is read again when it changes, so a revoked
    key is rejected at once. Without a key file, a server on a loopback address requires that the Host header names a
    loopback host, which prevents DNS rebinding. Cross-origin requests of browsers are always rejected.
    """

    def __init__(self, options: ServeOptions):
        self.key_file = options.keys
        self._is_local = options.is_local
        self._keys: tuple[ApiKey, ...] = ()
        self._file_version: tuple[int, int] | None = None

    def authenticate(self, request: Request) -> ApiKey | None:
        """Return the API key of a request, or None if the server uses no keys.

        Raises:
            ApiError: 400 if the Origin or Host header is not valid, 401 if the API key is missing or invalid, 403 if
                the origin or host is not allowed, 503 if the key file cannot be read.
        """
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        try:
            origin_host = None if origin is None else urlsplit(origin).netloc
            host_name = urlsplit(f"//{host}").hostname
        except ValueError:
            raise ApiError(400, "the Origin or Host header is not a valid address.", "invalid_host") from None
        if origin_host is not None and origin_host != host:
            raise ApiError(403, "web pages of other origins may not use this server.", "cross_origin")
        if self.key_file is not None:
            return self._find_key(self.key_file, request.headers.get("authorization", ""))
        if self._is_local and host_name not in LOOPBACK_HOSTS:
            message = "this server has no API keys, so requests must be addressed to localhost or 127.0.0.1."
            raise ApiError(403, message, "wrong_host")
        return None

    def authorize(self, key: ApiKey | None, *, needs_admin: bool) -> None:
        """Check that a key may use an endpoint. A server without keys has one user, who may use all endpoints.

        Raises:
            ApiError: 403 if the endpoint needs an admin key and this key is none.
        """
        if needs_admin and key is not None and not key.admin:
            message = "this endpoint shows or changes data of all API keys, so it needs an admin key."
            raise ApiError(403, f"{message} Ask the operator of the server for one.", "admin_only")

    def _find_key(self, key_file: Path, authorization: str) -> ApiKey:
        """Return the stored key that matches the bearer token of a request.

        Raises:
            ApiError: 401 if no key matches.
        """
        scheme, _, credentials = authorization.partition(" ")
        key = match_key(self._read_keys(key_file), credentials.strip())
        if scheme.lower() != "bearer" or key is None:
            raise ApiError(
                401, "the API key is missing or invalid. Send the header: Authorization: Bearer KEY.", "invalid_api_key"
            )
        return key

    def _read_keys(self, key_file: Path) -> tuple[ApiKey, ...]:
        """Return the stored keys. The file is read only if its size or modification time has changed."""
        try:
            stat = key_file.stat()
            if (version := (stat.st_mtime_ns, stat.st_size)) != self._file_version:
                self._keys, self._file_version = read_keys(key_file), version
        except (OSError, KnowgateError):
            raise ApiError(
                503, "the server cannot read its file of API keys. Try again later.", "keys_unreadable"
            ) from None
        return self._keys


class RateLimiter:
    """Limits the requests per minute of each API key, counted across all server processes.

    The counters are stored next to the key file, or in the shared database. If that store is unavailable, requests of
    keys with a rate are rejected (fail closed), and the store is not tried again for BACKOFF_SECONDS.

    Args:
        key_file: File of API keys. The counters are stored in a file next to it.
        clock: Returns the time in seconds since 1970. All processes must use the same clock.
        database: Address (postgresql://...) of a database for the counters, instead of the file.
    """

    def __init__(self, key_file: Path, clock: Callable[[], float] = time.time, *, database: str | None = None):
        self._location = database or str(key_file.with_name(f"{key_file.name}.used.db"))
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "knowgate-limits")
        self._store: Store | None = None
        self._retry_at = 0.0
        self._occupied_until: dict[str, float] = {}  # hash of a key -> the last value that was read or written

    async def admit(self, key: ApiKey, count: int = 1) -> None:
        """Count requests of this key. Keys without a limit are not counted.

        Args:
            key: The API key.
            count: Number of requests to admit together. The questions of one POST /v1/decide count as requests.

        Raises:
            ApiError: 429 if the key has used up its requests per minute, 503 if the requests cannot be counted.
        """
        if key.rate is None:
            return
        self._check_rate(key, key.rate, self._occupied_until.get(key.hash, 0.0), count)
        unavailable = ApiError(
            503,
            "the server cannot count the requests of this API key. Try again in a second.",
            "rate_unavailable",
            {"retry-after": "1"},
        )
        if time.monotonic() < self._retry_at:
            raise unavailable
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._count, key, key.rate, count)
        except STORE_ERRORS as error:
            self._retry_at = time.monotonic() + BACKOFF_SECONDS
            log.warning("Keys with a rate are rejected: %s", str(error) or "the counter store is too slow")
            raise unavailable from None

    def _check_rate(self, key: ApiKey, rate: int, occupied_until: float, count: int) -> float:
        """Return until when a key's time is occupied if `count` more requests are admitted.

        The value in the store never decreases. So a request that exceeds the rate by the last known value is rejected
        without reading the store, which keeps bursts cheap.

        Raises:
            ApiError: 429 if that is more than a minute from now.
        """
        now = self._clock()
        occupied_until = max(occupied_until, now) + count * MINUTE_SECONDS / rate
        excess = occupied_until - now - MINUTE_SECONDS
        if excess > ROUNDING_SECONDS:
            seconds = max(1, math.ceil(excess))
            message = f"this API key allows {rate} requests per minute. Try again in {seconds} seconds."
            raise ApiError(429, message, "rate", {"retry-after": str(seconds)})
        return occupied_until

    def _count(self, key: ApiKey, rate: int, count: int) -> None:
        """Count requests with the generic cell rate algorithm.

        Each request occupies 1 / rate of a minute, after the time that earlier requests occupy. A request is rejected if
        the occupied time would end more than a minute from now.
        """
        if self._store is None:
            self._store = open_store(
                self._location, (RATE_LIMIT_TABLES,), lock_timeout=LOCK_TIMEOUT_SECONDS, is_durable=False
            )
        self._check_rate(key, rate, self._occupied_until.get(key.hash, 0.0), count)
        with self._store.transaction(key.hash) as transaction:
            row = transaction.execute("SELECT until FROM used WHERE key = ?", (key.hash,)).fetchone()
            self._occupied_until[key.hash] = row[0] if row else 0.0
            occupied_until = self._check_rate(key, rate, self._occupied_until[key.hash], count)
            transaction.execute(UPSERT_USAGE, (key.hash, occupied_until))
        self._occupied_until[key.hash] = occupied_until

    def close(self) -> None:
        """Wait for pending counts and close the store."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)
