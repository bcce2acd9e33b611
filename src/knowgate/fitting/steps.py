"""How far a fit is, as those who watch it are told. Knows nothing of bars and terminals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class FitStep(Protocol):
    """`done` of `total` things called `unit`, in this `stage`; `words` say more, such as the pace.

    is_milestone: worth a line of its own.
    """

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def stage(self) -> str: ...

    @property
    def words(self) -> str: ...

    @property
    def is_milestone(self) -> bool: ...


WatchFit = Callable[[FitStep], None]


@dataclass(frozen=True)
class PlainStep:
    """A step of a fit that has nothing more to tell."""

    done: int
    total: int
    unit: str = "questions"
    stage: str = "fitting"
    words: str = ""
    is_milestone: bool = False


def unwatched(step: FitStep) -> None:
    """Nobody looks."""
