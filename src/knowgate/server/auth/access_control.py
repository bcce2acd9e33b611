"""Access control: who may send requests, and how many per minute."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from knowgate.errors import KnowgateError
from knowgate.server.auth.api_keys import ApiKey, match_key, read_keys
from knowgate.server.database import RATE_LIMIT_MIGRATIONS, STORE_ERRORS, Store, Transaction, open_store
from knowgate.server.json_api import ApiError
from knowgate.server.options import LOOPBACK_HOSTS, ServeOptions

log = logging.getLogger(__name__)

MINUTE_SECONDS = 60
LOCK_TIMEOUT_SECONDS = 1.0
ADMISSION_TIMEOUT_SECONDS = 5.0  # maximum time to count a request, which may wait for the counts of others
BACKOFF_SECONDS = 1.0  # time in which keys with a rate are rejected after the store of the counters has failed
UPSERT_REQUESTS = (
    "INSERT INTO requests (key, second, count) VALUES (?, ?, ?) "
    "ON CONFLICT (key, second) DO UPDATE SET count = requests.count + excluded.count"
)


class AccessPolicy:
    """Access rules of the server: valid API key, host and origin.

    A local server without keys accepts only local hosts, against DNS rebinding.
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
            logins = request.headers.getlist("authorization") or [""]
            if len(logins) > 1:
                raise ApiError(400, "the request has several Authorization headers. Send one.", "several_logins")
            return self._find_key(self.key_file, logins[0])
        if self._is_local and host_name not in LOOPBACK_HOSTS:
            message = "this server has no API keys, so requests must be addressed to localhost or 127.0.0.1."
            raise ApiError(403, message, "wrong_host")
        return None

    def authorize(self, key: ApiKey | None, *, needs_admin: bool) -> None:
        """Check that a key may use an endpoint. Without keys, every endpoint is allowed.

        Raises:
            ApiError: 403 if the endpoint needs an admin key and this key is not one.
        """
        if needs_admin and key is not None and not key.admin:
            message = "this endpoint needs an admin API key. Ask the operator of the server for an admin key."
            raise ApiError(403, message, "admin_only")

    def _find_key(self, key_file: Path, authorization: str) -> ApiKey:
        """Return the stored key that matches the bearer token of a request.

        Raises:
            ApiError: 401 if no key matches.
        """
        scheme, _, credentials = authorization.partition(" ")
        key = match_key(self._read_keys(key_file), credentials.strip())
        if scheme.lower() != "bearer" or key is None:
            message = "the API key is missing or invalid. Send the header: Authorization: Bearer KEY."
            raise ApiError(401, message, "invalid_api_key")
        return key

    def list_keys(self) -> tuple[ApiKey, ...] | None:
        """Return the stored keys, or None if the key file cannot be read."""
        if self.key_file is None:
            return ()
        with suppress(ApiError):
            return self._read_keys(self.key_file)
        return None

    def _read_keys(self, key_file: Path) -> tuple[ApiKey, ...]:
        """Return the stored keys. The file is read only if its size or modification time has changed."""
        try:
            stat = key_file.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if version != self._file_version:
                self._keys = read_keys(key_file)
                self._file_version = version
        except (OSError, KnowgateError):
            message = "the server cannot read its file of API keys. Try again later."
            raise ApiError(503, message, "keys_unreadable") from None
        return self._keys


def check_question_rate(key: ApiKey | None, count: int) -> None:
    """Raise ApiError 400 if a list has more questions than its API key may ever ask in a minute. Each is a request."""
    if key is not None and key.rate is not None and count > key.rate:
        message = f"this API key allows {key.rate} questions per minute. Send at most {key.rate} questions at once."
        raise ApiError(400, message, "rate")


class RateLimiter:
    """Limit on the requests per minute of each API key, across all server processes.

    Without access to the counters, requests of limited keys are rejected.

    Args:
        key_file: File of API keys. The counters are stored in a file next to it.
        clock: Returns the time in seconds since 1970. All processes must use the same clock.
        database: Address (postgresql://...) of a database for the counters, instead of the file.

    Attributes:
        problem: Why requests of keys with a rate were rejected at the last attempt, or "" if they were counted.
    """

    def __init__(self, key_file: Path, clock: Callable[[], float] = time.time, *, database: str | None = None):
        self._file = None if database else key_file.with_name(f"{key_file.name}.used.db")
        self._location = database or str(self._file)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "knowgate-limits")
        self._store: Store | None = None
        self._file_id: tuple[int, int] | None = None  # of the file that is open
        self._retry_at = 0.0
        self.problem = ""
        # Hash and rate of a key -> number of requests that were rejected together, and when they will be allowed.
        self._rejections: dict[tuple[str, int], tuple[int, int]] = {}

    def check_store(self, keys: Sequence[ApiKey]) -> None:
        """Open the store of the counters, if any key has a rate limit. Log a warning on failure."""
        try:
            if any(key.rate is not None for key in keys):
                self._thread.submit(self._open_store).result()
        except STORE_ERRORS as error:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Log why requests cannot be counted. Do not try the store again for BACKOFF_SECONDS."""
        self._retry_at = time.monotonic() + BACKOFF_SECONDS
        self.problem = "at the last attempt, requests of API keys with a rate limit could not be counted"
        log.warning("API keys with a rate limit are rejected: %s", str(error) or "the counter store is too slow")

    async def admit(self, key: ApiKey, count: int = 1) -> None:
        """Count requests of a key, or reject too many. Keys without a limit are not counted.

        Args:
            key: The API key.
            count: Number of requests to admit together. The questions of one POST /v1/decide count as requests.

        Raises:
            ApiError: 429 if the key has used up its requests per minute, 503 if the requests cannot be counted.
        """
        if key.rate is None:
            return
        self._check_rejection(key, key.rate, count)
        message = "the server cannot count the requests of this API key. Try again in a second."
        unavailable = ApiError(503, message, "rate_unavailable", {"retry-after": "1"})
        if time.monotonic() < self._retry_at:
            raise unavailable
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._count, key, key.rate, count)
            self.problem = ""
        except STORE_ERRORS as error:
            self._report(error)
            raise unavailable from None

    def _check_rejection(self, key: ApiKey, rate: int, count: int) -> None:
        """Reject requests of a key that must still wait, because as many requests were rejected before.

        Args:
            key: The API key.
            rate: Maximum requests per minute of this key.
            count: Number of requests to admit together.

        Raises:
            ApiError: 429 if the key must still wait.
        """
        if (key.hash, rate) not in self._rejections:
            return
        rejected_count, allowed_at = self._rejections[key.hash, rate]
        seconds = math.ceil(allowed_at - self._clock())
        must_wait = 0 < seconds <= MINUTE_SECONDS + 1  # a longer wait comes from a clock that was set back
        if must_wait and count >= rejected_count:  # fewer requests may still be allowed
            raise _make_rate_error(rate, seconds)

    def _count(self, key: ApiKey, rate: int, count: int) -> None:
        """Count new requests of a key. If they would exceed its rate limit, count none and reject them all.

        Raises:
            ApiError: 429 if the key has used up its requests per minute.
        """
        self._check_rejection(key, rate, count)  # again, because another request may have been rejected meanwhile
        with self._open_store().transaction(key.hash) as transaction:
            now = math.floor(self._clock())
            rows = _fetch_last_minute(transaction, key.hash, now)
            excess = sum(row_count for _, row_count in rows) + count - rate
            if excess <= 0:
                transaction.execute(UPSERT_REQUESTS, (key.hash, now, count))
                return
        allowed_at = _find_blocking_second(rows, excess, now) + MINUTE_SECONDS + 1
        self._rejections[key.hash, rate] = (count, allowed_at)
        raise _make_rate_error(rate, allowed_at - now)

    def _open_store(self) -> Store:
        """Return the open store of the counters. Open a replaced file again."""
        was_replaced = self._file is not None and _identify_file(self._file) != self._file_id
        if self._store is not None and was_replaced:
            self._store.close()
            self._store = None
        if self._store is None:
            self._store = open_store(
                self._location, RATE_LIMIT_MIGRATIONS, lock_timeout=LOCK_TIMEOUT_SECONDS, is_durable=False
            )
            self._file_id = None if self._file is None else _identify_file(self._file)
        return self._store

    def close(self) -> None:
        """Wait for pending counts and close the store."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


def _fetch_last_minute(transaction: Transaction, key_hash: str, now: int) -> list[tuple[int, int]]:
    """Return the requests of a key in the last minute, as (second, count). Delete other rows."""
    query = "SELECT second, count FROM requests WHERE key = ? ORDER BY second"
    rows = transaction.execute(query, (key_hash,)).fetchall()
    # Rows of the future: the clock was set back, or the clock of another server is ahead. They count as sent now.
    future_count = sum(count for second, count in rows if now < second <= now + MINUTE_SECONDS)
    deletion = "DELETE FROM requests WHERE key = ? AND (second < ? OR second > ?)"
    transaction.execute(deletion, (key_hash, now - MINUTE_SECONDS, now))
    if future_count:
        transaction.execute(UPSERT_REQUESTS, (key_hash, now, future_count))
    last_minute: list[tuple[int, int]] = transaction.execute(query, (key_hash,)).fetchall()
    return last_minute


def _find_blocking_second(rows: Sequence[tuple[int, int]], excess: int, now: int) -> int:
    """Return the second whose requests must become a minute old before the rejected requests are allowed.

    Example: with [(5, 2), (9, 3)] and an `excess` of 3, those of second 5 are too few, so the result is 9.

    Args:
        rows: The requests of the last minute, as (second, count), oldest first.
        excess: Number of requests above the limit.
        now: The current second, which is returned if `rows` has fewer than `excess` requests.
    """
    totals = accumulate(count for _, count in rows)
    return next((second for (second, _), total in zip(rows, totals, strict=True) if total >= excess), now)


def _make_rate_error(rate: int, seconds: int) -> ApiError:
    """Return the error for too many requests. `seconds` is the time to wait."""
    message = f"this API key allows {rate} requests per minute. Try again in {seconds} seconds."
    return ApiError(429, message, "rate", {"retry-after": str(seconds)})


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Return the device and inode numbers of a file. They change when the file is replaced."""
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino
    return None
