"""How a first run says what it does. Whoever runs it decides where the words go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Teller(Protocol):
    """Told in sentences, and how far a long step is."""

    def say(self, line: str) -> None: ...

    def warn(self, line: str) -> None:
        """What must not be missed."""

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None: ...


@dataclass(frozen=True)
class Silent:
    """Nobody listens."""

    def say(self, line: str) -> None:
        pass

    def warn(self, line: str) -> None:
        pass

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        pass
