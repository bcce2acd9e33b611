"""Circuit breakers, which stop calls to a component that keeps failing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FAILURE_THRESHOLD = 5
RECOVERY_SECONDS = 15.0


@dataclass
class CircuitBreaker:
    """Switch that stops calls to a component after several failures in a row.

    "open" rejects calls for a while. "half-open" allows one call as a probe. "closed" allows all calls.
    """

    name: str
    is_confirmed_by_probe: bool = False
    failure_threshold: int = FAILURE_THRESHOLD
    recovery_seconds: float = RECOVERY_SECONDS
    clock: Callable[[], float] = time.monotonic
    failure_count: int = 0
    last_failure: float = 0.0
    last_success: float = float("-inf")
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

        After an allowed call, report its outcome, for example with `record_success`.
        """
        state = self.state
        if state == "half-open" and not self.is_probing:
            self.is_probing = True
            return True
        return state == "closed"

    def record_success(self) -> None:
        """Report a successful call. This closes the breaker (calls are allowed)."""
        self.failure_count = 0
        self.is_probing = False
        self.last_success = self.clock()

    def record_failure(self, start: float | None = None) -> None:
        """Report a failed call. Several failures in a row open the breaker (calls are rejected).

        Args:
            start: Time at which the call started. If another call succeeded since then, the component works for
                others, and the failure does not count.
        """
        self.is_probing = False
        if start is not None and start <= self.last_success:
            return
        self.failure_count += 1
        if not self.is_confirmed_by_probe:
            self.last_failure = self.clock()
        elif self.failure_count == self.failure_threshold:
            self.last_failure = float("-inf")  # without a waiting time, the state is "half-open" at once

    def trip(self) -> None:
        """Open the breaker now, whatever was reported before."""
        self.failure_count = self.failure_threshold
        self.is_probing = False
        self.last_failure = self.clock()

    def record_cancellation(self) -> None:
        """Report that a call was cancelled, which counts neither as success nor as failure."""
        self.is_probing = False


class BreakersByKey:
    """Circuit breakers of one component, one per API key. Failing requests of one key do not affect others.

    Args:
        name: Name of the component.
    """

    def __init__(self, name: str):
        self.name = name
        self._breakers: dict[str, CircuitBreaker] = {}

    def get(self, owner: str) -> CircuitBreaker:
        """Return the breaker of an API key, given by its name. Without keys, all requests have the owner ""."""
        return self._breakers.setdefault(owner, CircuitBreaker(self.name))

    @property
    def state(self) -> str:
        """Worst state of the component for any API key. Keys are ignored while the component works for others."""
        states = set()
        failing = [breaker for breaker in self._breakers.values() if breaker.state != "closed"]
        for breaker in failing:
            other_successes = [other.last_success for other in self._breakers.values() if other is not breaker]
            last_other_success = max(other_successes, default=float("-inf"))
            works_for_others = last_other_success >= breaker.last_failure - RECOVERY_SECONDS
            if not works_for_others:
                states.add(breaker.state)
        if "open" in states:
            return "open"
        return "half-open" if "half-open" in states else "closed"
