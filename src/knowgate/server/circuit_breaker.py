"""Circuit breaker, which stops calls to a component that keeps failing and tries it again after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FAILURE_THRESHOLD = 5
RECOVERY_SECONDS = 15.0


@dataclass
class CircuitBreaker:
    """Stops calls to a component after several consecutive failures.

    In state "closed", calls are allowed. After `failure_threshold` failures in a row, the breaker is "open" and rejects
    calls for `recovery_seconds`. Then it is "half-open" and allows one call as a probe. If the probe succeeds, the
    breaker closes; if it fails, the breaker opens again. Not thread-safe: use it from the event loop only.
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
        """Seconds until an open breaker allows the next call."""
        return max(0.0, self.last_failure + self.recovery_seconds - self.clock())

    def try_acquire(self) -> bool:
        """Return whether a call is allowed now.

        If it is, the caller must report the outcome with `record_success`, `record_failure` or `record_cancellation`.
        """
        state = self.state
        if state == "half-open" and not self.is_probing:
            self.is_probing = True
            return True
        return state == "closed"

    def record_success(self) -> None:
        """Report that a call succeeded, which closes the breaker."""
        self.failure_count, self.is_probing = 0, False

    def record_failure(self) -> None:
        """Report that a call failed, which may open the breaker."""
        self.failure_count, self.is_probing = self.failure_count + 1, False
        self.last_failure = self.clock()

    def trip(self) -> None:
        """Open the breaker now, whatever was reported before."""
        self.failure_count, self.is_probing = self.failure_threshold, False
        self.last_failure = self.clock()

    def record_cancellation(self) -> None:
        """Report that a call was cancelled, which counts neither as success nor as failure."""
        self.is_probing = False
