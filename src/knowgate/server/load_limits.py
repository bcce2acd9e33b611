"""Limits on the requests of one client and of all clients, so that no client can starve the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from knowgate.server.auth.api_keys import ApiKey
from knowgate.server.json_api import ApiError

MAX_UNFINISHED_BYTES = 256 << 20  # maximum bytes of all request bodies that have not arrived completely
UPLOAD_FACTOR = 8  # unfinished bodies of all clients, as a multiple of those of one client


class RequestSlots:
    """Counts requests in progress, and rejects further ones above a limit.

    Args:
        total: Maximum number for all clients together.
        per_client: Maximum number for one client.
    """

    def __init__(self, total: int, per_client: int):
        self.total = total
        self.per_client = per_client
        self.count_by_client: Counter[str] = Counter()
        self.count = 0

    def acquire(self, client: str) -> None:
        """Count a request. Call `release` when it has ended.

        Raises:
            ApiError: 429 if the client, or all clients together, have too many requests in progress.
        """
        if self.count >= self.total or self.count_by_client[client] >= self.per_client:
            message = "too many requests are in progress. Try again in a second."
            raise ApiError(429, message, "busy", {"retry-after": "1"})
        self.count += 1
        self.count_by_client[client] += 1

    def release(self, client: str) -> None:
        """Stop counting a request."""
        self.count -= 1
        self.count_by_client[client] -= 1
        if not self.count_by_client[client]:
            del self.count_by_client[client]

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Count a request while the body of this context manager runs."""
        self.acquire(client)
        try:
            yield
        finally:
            self.release(client)


class UploadBudget:
    """Limits the memory for request bodies that have not arrived completely, over all clients."""

    def __init__(self, max_bytes: int = MAX_UNFINISHED_BYTES):
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def reserve(self, size: int) -> None:
        """Reserve memory for a part of a body. Pass a negative size to free it.

        Raises:
            ApiError: 429 if the budget is used up.
        """
        if size > 0 and self.used_bytes + size > self.max_bytes:
            raise ApiError(429, "too many large requests arrive at once. Try again in a second.", "busy")
        self.used_bytes += size


def identify_client(request: Request, key: ApiKey | None) -> str:
    """Return who sends a request: the hash of the API key or, without keys, the network address."""
    if key is not None:
        return key.hash
    return request.client.host if request.client is not None else ""
