"""How far a long job is, and how long is left: a bar on a terminal, elsewhere a line on stderr now and then.

Knows counts and clocks; nothing of what is counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.core.display import sanitize_text

FIRST_LINE_SECONDS, MAX_LINE_INTERVAL = 3.0, 60.0  # seconds until the first line, and between lines at most
MINUTE, HOUR = 60.0, 3600.0


class ProgressCallback(Protocol):
    """What a job calls to say how far it is. pace: in words, where the job knows it better than the clock."""

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""


@contextmanager
def show_progress(what: str, unit: str, console: Console) -> Iterator[ProgressCallback]:
    """For a job that goes through things called `unit`; `what` says what it does with them."""
    if not console.is_terminal:
        yield ProgressLines(what, unit, _printer(console))
        return
    with _bar(console) as bar:
        yield ProgressBar(what, unit, bar)


def show_question_progress(what: str, console: Console) -> AbstractContextManager[ProgressCallback]:
    """The same for jobs that go through questions."""
    return show_progress(what, "questions", console)


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
class ProgressBar:
    """Drawn by rich; a stage of another name starts a bar of its own."""

    what: str
    unit: str
    bar: Any
    tasks: dict[str, Any] = field(default_factory=dict)
    begun: dict[str, StageStart] = field(default_factory=dict)

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        name = sanitize_text(stage or self.what)
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=None, pace="")
        start = self.begun.setdefault(name, StageStart(done, time.monotonic()))
        pace = pace or format_pace(start.rate(done, time.monotonic()), unit or self.unit)
        self.bar.update(self.tasks[name], completed=done, total=total, pace=pace)

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)


@dataclass(frozen=True)
class StageStart:
    """Where a stage stood when it was first heard of: what an earlier start did says nothing about the pace."""

    done: int
    at: float

    def rate(self, done: int, now: float) -> float:
        """Things in a second; 0 where that is not known yet."""
        return (done - self.done) / (now - self.at) if now > self.at else 0.0


@dataclass
class ProgressLines:
    """A line after a few seconds, then after twice as long, up to one a minute."""

    what: str
    unit: str
    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    due: float = 0.0
    wait: float = field(default_factory=lambda: FIRST_LINE_SECONDS)
    begun: dict[str, StageStart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.due = self.clock() + self.wait

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        now, name = self.clock(), stage or self.what
        start = self.begun.setdefault(name, StageStart(done, now))
        if now < self.due or done >= total:
            return
        self.wait = min(2 * self.wait, MAX_LINE_INTERVAL)
        self.due = now + self.wait
        self.write(format_progress_line(name, done, total, unit or self.unit, start.rate(done, now), pace))

    def say(self, line: str) -> None:
        self.write(line)


def format_pace(rate: float, unit: str) -> str:
    return f"{rate:{',.0f' if rate >= 10 else '.2g'}} {unit}/s" if rate > 0 else ""


def format_progress_line(what: str, done: int, total: int, unit: str, rate: float, pace: str = "") -> str:
    """'labelling: 120 of 1,000 questions, 3.2 questions/s, 4 min left'; without a rate, without the end of it."""
    parts = [f"{what}: {done:,} of {total:,} {unit}"]
    if pace or rate > 0:
        parts.append(pace or format_pace(rate, unit))
    if rate > 0:
        parts.append(f"{format_duration((total - done) / rate)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """'40 s', '4 min', '2.5 h'."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"


WAITING_LINE_SECONDS = 5.0  # seconds between two lines


@contextmanager
def show_waiting(what: str, every: float = WAITING_LINE_SECONDS) -> Iterator[None]:
    """Said at once on stderr, and again while it lasts.

    The stream is taken now: libraries that are kept quiet may have another put in its place meanwhile.
    """
    console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
    with _clock(console, what) if console.is_terminal else _lines(console, what, every):
        yield


@contextmanager
def _clock(console: Console, what: str) -> Iterator[None]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), words, TimeElapsedColumn(), console=console, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


@contextmanager
def _lines(console: Console, what: str, every: float) -> Iterator[None]:
    console.print(f"{what} ...", soft_wrap=True)
    start, over = time.monotonic(), threading.Event()
    say: Callable[[], None] = lambda: console.print(f"  {time.monotonic() - start:.0f} s", soft_wrap=True)  # noqa: E731
    speaker = threading.Thread(target=_repeat, args=(say, over, every), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _repeat(say: Callable[[], None], over: threading.Event, every: float) -> None:
    while not over.wait(every):
        say()


@contextmanager
def show_arbitration_progress(arbiter: str | None) -> Iterator[Callable[[int, int], None]]:
    """What an arbiter tells how far it is; without one there is nothing to see."""
    if arbiter is None:
        yield lambda done, total: None
        return
    with show_progress("weighing answers", "questions", STDERR_CONSOLE) as show:
        yield lambda done, total: show(done, total)
