"""So many calls an hour and no more: what is not used is saved up for one hour at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

HOUR = 3600.0


@dataclass
class Budget:
    """per_hour: calls."""

    per_hour: int
    clock: Callable[[], float] = time.monotonic
    left: float = field(init=False)
    seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.seen = float(self.per_hour), self.clock()

    @property
    def is_there(self) -> bool:
        """Whether another call may be made."""
        now = self.clock()
        self.left = min(float(self.per_hour), self.left + (now - self.seen) * self.per_hour / HOUR)
        self.seen = now
        return self.left >= 1

    def spend(self) -> None:
        self.left -= 1
