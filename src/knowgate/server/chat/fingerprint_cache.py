"""Caches the fingerprint of a retriever, which identifies the content of its index."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from knowgate.types import Passage, Retriever

FINGERPRINT_TTL_SECONDS = 60.0


class FingerprintCachingRetriever:
    """Wraps a retriever and caches its fingerprint, which identifies the content of its index.

    Computing a fingerprint can take a network call or a scan of a database table. It is computed again after `ttl`
    seconds, or after a search has failed.
    """

    def __init__(
        self, retriever: Retriever, ttl: float = FINGERPRINT_TTL_SECONDS, clock: Callable[[], float] = time.monotonic
    ):
        self.retriever = retriever
        self._ttl = ttl
        self._clock = clock
        self._fingerprint = ""
        self._expires = float("-inf")

    @property
    def name(self) -> str:
        return self.retriever.name

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the retriever, which is at most `ttl` seconds old."""
        now = self._clock()
        if now >= self._expires:
            self._expires = float("-inf")  # if the next line fails, the next call tries again
            self._fingerprint = self.retriever.fingerprint
            self._expires = now + self._ttl
        return self._fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search with the wrapped retriever. If that fails, discard the cached fingerprint."""
        try:
            return self.retriever.search(queries, k)
        except Exception:
            self._expires = float("-inf")
            raise
