"""Deadlines for all network access of a thread or task: connections, reads and writes of HTTP clients end in time.

Reads also end if nobody waits for the result any more.
"""

from __future__ import annotations

import contextlib
import math
import ssl
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import httpcore

from knowgate.core.stop_flag import check_stop_flag

STOP_SECONDS = 0.5  # interval at which a read checks whether it is still wanted
REQUEST_DEADLINE: ContextVar[float] = ContextVar("deadline of this thread's request", default=math.inf)


@contextlib.contextmanager
def request_deadline(end: float) -> Iterator[None]:
    """Set a deadline for network access of this thread inside the `with` block.

    Of nested deadlines, the earlier one applies.

    Args:
        end: The deadline, a time of `time.monotonic`.
    """
    token = REQUEST_DEADLINE.set(min(end, REQUEST_DEADLINE.get()))
    try:
        yield
    finally:
        REQUEST_DEADLINE.reset(token)


class DeadlineBackend(httpcore.NetworkBackend):
    """Network backend with a deadline for all connections, set by `request_deadline`."""

    def __init__(self, inner: httpcore.NetworkBackend):
        self._inner = inner

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        limit = _limit_timeout(timeout, httpcore.ConnectTimeout)
        return DeadlineStream(self._inner.connect_tcp(host, port, limit, *args, **options))


class DeadlineStream(httpcore.NetworkStream):
    """Connection with a deadline for reads and writes, set by `request_deadline`."""

    def __init__(self, inner: httpcore.NetworkStream):
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        limit = _limit_timeout(timeout, httpcore.ReadTimeout)
        end = math.inf if limit is None else time.monotonic() + limit
        while True:
            try:
                return self._inner.read(max_bytes, max(0.001, min(STOP_SECONDS, end - time.monotonic())))
            except httpcore.ReadTimeout:
                if time.monotonic() >= end:
                    raise
                check_stop_flag()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _limit_timeout(timeout, httpcore.WriteTimeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = _limit_timeout(timeout, httpcore.ConnectTimeout)
        return DeadlineStream(self._inner.start_tls(ssl_context, server_hostname, limit))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _limit_timeout(timeout: float | None, make_error: Callable[[str], Exception]) -> float | None:
    """Return the timeout or the time until the deadline, if shorter."""
    left = REQUEST_DEADLINE.get() - time.monotonic()
    if left <= 0:
        raise make_error("the deadline of the request has passed")
    if left == math.inf:  # no deadline is set
        return timeout
    return left if timeout is None else min(left, timeout)
