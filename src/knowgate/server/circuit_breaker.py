"""A circuit breaker: what failed several times in a row is left alone for a while, then tried by one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FAILURE_THRESHOLD = 5
RECOVERY_SECONDS = 15.0  # seconds


@dataclass
class CircuitBreaker:
    """closed: used; open: left alone; half-open: one request tries it. Used from the event loop only."""

    name: str
    failures: int = FAILURE_THRESHOLD
    pause: float = RECOVERY_SECONDS
    clock: Callable[[], float] = time.monotonic
    failed: int = 0
    opened: float = 0.0
    probing: bool = False

    @property
    def state(self) -> str:
        if self.failed < self.failures:
            return "closed"
        return "open" if self.clock() < self.opened + self.pause else "half-open"

    def allows(self) -> bool:
        """Whether it may be used now. Who is told so says afterwards how it went."""
        state = self.state
        if state == "half-open" and not self.probing:
            self.probing = True
            return True
        return state == "closed"

    def succeed(self) -> None:
        self.failed, self.probing = 0, False

    def fail(self) -> None:
        self.failed, self.probing = self.failed + 1, False
        self.opened = self.clock()

    def forget(self) -> None:
        """It was not found out: the request was cancelled."""
        self.probing = False

    @property
    def left(self) -> float:
        """Seconds until it is tried again."""
        return max(0.0, self.opened + self.pause - self.clock())
