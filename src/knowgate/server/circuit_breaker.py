"""Circuit breaker: stop calling a component that keeps failing, and probe it again after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FAILURE_THRESHOLD = 5
RECOVERY_SECONDS = 15.0


@dataclass
class CircuitBreaker:
    """Counts consecutive failures of one component. Not thread-safe: use it from the event loop only.

    States: "closed" (calls are allowed), "open" (calls are rejected until the recovery time has passed) and "half-open"
    (a single probe is allowed; its outcome closes or reopens the breaker).
    """

    name: str
    failure_threshold: int = FAILURE_THRESHOLD
    recovery_seconds: float = RECOVERY_SECONDS
    clock: Callable[[], float] = time.monotonic
    failure_count: int = 0
    last_failure: float = 0.0
    is_probing: bool = False

    @property
    def state(self) -> str:
        """State of the breaker: "closed", "open" or "half-open"."""
        if self.failure_count < self.failure_threshold:
            return "closed"
        return "open" if self.clock() < self.last_failure + self.recovery_seconds else "half-open"

    @property
    def seconds_until_probe(self) -> float:
        return max(0.0, self.last_failure + self.recovery_seconds - self.clock())

    def try_acquire(self) -> bool:
        """Return whether a call is allowed now; the caller must report its outcome afterwards."""
        state = self.state
        if state == "half-open" and not self.is_probing:
            self.is_probing = True
            return True
        return state == "closed"

    def record_success(self) -> None:
        self.failure_count, self.is_probing = 0, False

    def record_failure(self) -> None:
        self.failure_count, self.is_probing = self.failure_count + 1, False
        self.last_failure = self.clock()

    def record_cancellation(self) -> None:
        """End a call that was cancelled: it neither succeeded nor failed."""
        self.is_probing = False
