"""A retriever whose fingerprint is asked for once a minute, however many requests want to know what is proven of it.

An engine is asked for it over the network, and a database reads a whole table. So a collection that was changed is
noticed within a minute, or at once where a search fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from knowgate.types import Passage, Retriever

SECONDS = 60.0


class RememberingRetriever:
    """The retriever itself, but for its fingerprint."""

    def __init__(self, retriever: Retriever, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic):
        self.retriever = retriever
        self._seconds = seconds
        self._clock = clock
        self._known: tuple[str, float] | None = None  # and until when

    @property
    def name(self) -> str:
        return self.retriever.name

    @property
    def fingerprint(self) -> str:
        known, now = self._known, self._clock()
        if known is None or now >= known[1]:
            self._known = None  # one that cannot be had is asked for again
            self._known = known = (self.retriever.fingerprint, now + self._seconds)
        return known[0]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        try:
            return self.retriever.search(queries, k)
        except Exception:
            self._known = None
            raise
