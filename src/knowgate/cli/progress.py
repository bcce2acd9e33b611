"""Progress of long jobs: a bar on a terminal, otherwise a line on stderr now and then."""

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

FIRST_LINE_SECONDS, MAX_LINE_INTERVAL = 3.0, 60.0
WAITING_LINE_SECONDS = 5.0
MINUTE, HOUR = 60.0, 3600.0


class ProgressCallback(Protocol):
    """What a job calls to report its progress."""

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        """Report progress.

        Args:
            done: Items that are done.
            total: Items in total.
            pace: Speed in words, if the job knows it better than the clock.
            stage: Name of the current stage.
            unit: What the items are called.
        """

    def say(self, line: str) -> None:
        """Print a line that stays."""


@contextmanager
def show_progress(task: str, unit: str, console: Console) -> Iterator[ProgressCallback]:
    """Show the progress of a job.

    Args:
        task: What the job does ("labeling").
        unit: What its items are called ("questions").
        console: Where to print.
    """
    if not console.is_terminal:
        yield ProgressLines(task, unit, lambda line: console.print(line, markup=False, highlight=False))
        return
    with _create_bar(console) as bar:
        yield ProgressBar(task, unit, bar)


def show_question_progress(task: str, console: Console) -> AbstractContextManager[ProgressCallback]:
    """Show the progress of a job over questions."""
    return show_progress(task, "questions", console)


def _create_bar(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stage = TextColumn("{task.description}", markup=False)
    pace = TextColumn("{task.fields[pace]}", markup=False)
    columns = (stage, BarColumn(), MofNCompleteColumn(), pace, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


@dataclass
class ProgressBar:
    """Progress bar of rich; every stage has a bar of its own."""

    task: str
    unit: str
    bar: Any
    tasks: dict[str, Any] = field(default_factory=dict)
    starts: dict[str, StageStart] = field(default_factory=dict)

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        name = sanitize_text(stage or self.task)
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=None, pace="")
        start = self.starts.setdefault(name, StageStart(done, time.monotonic()))
        pace = pace or format_pace(start.compute_rate(done, time.monotonic()), unit or self.unit)
        self.bar.update(self.tasks[name], completed=done, total=total, pace=pace)

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)


@dataclass(frozen=True)
class StageStart:
    """State of a stage when it was first reported. A resumed job does not start at 0."""

    done: int
    at: float

    def compute_rate(self, done: int, now: float) -> float:
        """Return the items per second; 0 if unknown."""
        return (done - self.done) / (now - self.at) if now > self.at else 0.0


@dataclass
class ProgressLines:
    """Prints a line after a few seconds and then in intervals that double, up to one minute."""

    task: str
    unit: str
    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    next_at: float = 0.0
    interval: float = field(default_factory=lambda: FIRST_LINE_SECONDS)
    starts: dict[str, StageStart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_at = self.clock() + self.interval

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        now, name = self.clock(), stage or self.task
        start = self.starts.setdefault(name, StageStart(done, now))
        if now < self.next_at or done >= total:
            return
        self.interval = min(2 * self.interval, MAX_LINE_INTERVAL)
        self.next_at = now + self.interval
        self.write(format_progress_line(name, done, total, unit or self.unit, start.compute_rate(done, now), pace))

    def say(self, line: str) -> None:
        self.write(line)


def format_pace(rate: float, unit: str) -> str:
    """Format a rate as '3.2 questions/s'; empty if unknown."""
    return f"{rate:{',.0f' if rate >= 10 else '.2g'}} {unit}/s" if rate > 0 else ""


def format_progress_line(task: str, done: int, total: int, unit: str, rate: float, pace: str = "") -> str:
    """Format as 'labeling: 120 of 1,000 questions, 3.2 questions/s, 4 min left'."""
    parts = [f"{task}: {done:,} of {total:,} {unit}"]
    if pace or rate > 0:
        parts.append(pace or format_pace(rate, unit))
    if rate > 0:
        parts.append(f"{format_duration((total - done) / rate)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format as '40 s', '4 min' or '2.5 h'."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"


@contextmanager
def show_waiting(task: str, interval: float = WAITING_LINE_SECONDS) -> Iterator[None]:
    """Show that a job without countable steps is running: a clock on a terminal, otherwise lines on stderr.

    The stream is fixed at the start, because silenced libraries may replace sys.stderr meanwhile.
    """
    console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
    with _show_clock(console, task) if console.is_terminal else _print_seconds(console, task, interval):
        yield


@contextmanager
def _show_clock(console: Console, task: str) -> Iterator[None]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), description, TimeElapsedColumn(), console=console, transient=True) as bar:
        bar.add_task(task, total=None)
        yield


@contextmanager
def _print_seconds(console: Console, task: str, interval: float) -> Iterator[None]:
    """Print the elapsed seconds in regular intervals, from a background thread."""
    console.print(f"{task} ...", soft_wrap=True)
    start, is_done = time.monotonic(), threading.Event()

    def print_until_done() -> None:
        while not is_done.wait(interval):
            console.print(f"  {time.monotonic() - start:.0f} s", soft_wrap=True)

    thread = threading.Thread(target=print_until_done, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextmanager
def show_arbitration_progress(arbiter: str | None) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of an arbiter; nothing if there is none."""
    if arbiter is None:
        yield lambda done, total: None
        return
    with show_progress("arbitrating answers", "questions", STDERR_CONSOLE) as show:
        yield lambda done, total: show(done, total)
