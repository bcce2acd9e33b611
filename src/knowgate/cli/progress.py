"""How far a long job is, and how long is left: a bar on a terminal, elsewhere a line on stderr now and then.

Knows counts and clocks; nothing of what is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console

from knowgate.display import harmless

FIRST, LONGEST = 3.0, 60.0  # seconds until the first line, and between lines at most
MINUTE, HOUR = 60.0, 3600.0


class Show(Protocol):
    """What a job calls to say how far it is. pace: in words, where the job knows it better than the clock."""

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""


@contextmanager
def progress(what: str, unit: str, console: Console) -> Iterator[Show]:
    """For a job that goes through things called `unit`; `what` says what it does with them."""
    if not console.is_terminal:
        yield Lines(what, unit, _printer(console))
        return
    with _bar(console) as bar:
        yield Bar(what, unit, bar)


def question_bar(what: str, console: Console) -> AbstractContextManager[Show]:
    """The same for jobs that go through questions."""
    return progress(what, "questions", console)


def _printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, highlight=False)


def _bar(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stage = TextColumn("{task.description}", markup=False)
    pace = TextColumn("{task.fields[pace]}", markup=False)
    return Progress(
        stage, BarColumn(), MofNCompleteColumn(), pace, TimeRemainingColumn(), console=console, transient=True
    )


@dataclass
class Bar:
    """Drawn by rich; a stage of another name starts a bar of its own."""

    what: str
    unit: str
    bar: Any
    tasks: dict[str, Any] = field(default_factory=dict)
    begun: dict[str, Begun] = field(default_factory=dict)

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        name = harmless(stage or self.what)
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=None, pace="")
        start = self.begun.setdefault(name, Begun(done, time.monotonic()))
        pace = pace or pace_of(start.rate(done, time.monotonic()), unit or self.unit)
        self.bar.update(self.tasks[name], completed=done, total=total, pace=pace)

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)


@dataclass(frozen=True)
class Begun:
    """Where a stage stood when it was first heard of: what an earlier start did says nothing about the pace."""

    done: int
    at: float

    def rate(self, done: int, now: float) -> float:
        """Things in a second; 0 where that is not known yet."""
        return (done - self.done) / (now - self.at) if now > self.at else 0.0


@dataclass
class Lines:
    """A line after a few seconds, then after twice as long, up to one a minute."""

    what: str
    unit: str
    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    due: float = 0.0
    wait: float = field(default_factory=lambda: FIRST)
    begun: dict[str, Begun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.due = self.clock() + self.wait

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        now, name = self.clock(), stage or self.what
        start = self.begun.setdefault(name, Begun(done, now))
        if now < self.due or done >= total:
            return
        self.wait = min(2 * self.wait, LONGEST)
        self.due = now + self.wait
        self.write(line(name, done, total, unit or self.unit, start.rate(done, now), pace))

    def say(self, line: str) -> None:
        self.write(line)


def pace_of(rate: float, unit: str) -> str:
    return f"{rate:{',.0f' if rate >= 10 else '.2g'}} {unit}/s" if rate > 0 else ""


def line(what: str, done: int, total: int, unit: str, rate: float, pace: str = "") -> str:
    """'labelling: 120 of 1,000 questions, 3.2 questions/s, 4 min left'; without a rate, without the end of it."""
    parts = [f"{what}: {done:,} of {total:,} {unit}"]
    if pace or rate > 0:
        parts.append(pace or pace_of(rate, unit))
    if rate > 0:
        parts.append(f"{duration((total - done) / rate)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """'40 s', '4 min', '2.5 h'."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"
