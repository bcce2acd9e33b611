"""Progress of long jobs: a progress bar on a terminal, otherwise occasional lines on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.core.display import sanitize_text

FIRST_LINE_SECONDS, MAX_LINE_INTERVAL = 3.0, 60.0  # seconds before the first line, and at most between lines
WAITING_LINE_SECONDS = 5.0  # between lines of a job without countable steps
MINUTE, HOUR = 60.0, 3600.0


class ProgressCallback(Protocol):
    """Callback with which a job reports its progress."""

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        """Report progress.

        Args:
            done: Number of items that are done.
            total: Number of all items.
            pace: Speed in words; by default, it is computed from the elapsed time.
            stage: Name of the current stage of the job; empty if it has only one.
            unit: What the items are called, if different from the other stages.
        """

    def say(self, line: str) -> None:
        """Print a line of text that stays on the terminal above the progress bar."""


@contextmanager
def show_progress(task: str, unit: str, console: Console = STDERR_CONSOLE) -> Iterator[ProgressCallback]:
    """Show the progress of a job while the `with` block runs. Yields the callback for the job.

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


def _create_bar(console: Console) -> Any:
    """Create a progress display of rich that disappears when the job ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stage = TextColumn("{task.description}", markup=False)
    pace = TextColumn("{task.fields[pace]}", markup=False)
    columns = (stage, BarColumn(), MofNCompleteColumn(), pace, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


@dataclass
class ProgressBar:
    """Shows progress as bars on a terminal. Each stage of a job has its own bar.

    Attributes:
        task: What the job does; name of the bar of a job without stages.
        unit: What the items are called.
        bar: The progress display of rich, which holds all bars.
        tasks: Id that rich gave to the bar of each stage, by the name of the stage.
        starts: First report of each stage, to compute its speed.
    """

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
    """First report of a stage, from which its speed is computed.

    Attributes:
        done: Number of items that were already done; above 0 if the job was resumed.
        at: Time of the report.
    """

    done: int
    at: float

    def compute_rate(self, done: int, now: float) -> float:
        """Return the items per second since the first report; 0 if no time has passed."""
        return (done - self.done) / (now - self.at) if now > self.at else 0.0


@dataclass
class ProgressLines:
    """Shows progress as lines of text, for output that is not a terminal.

    The first line is printed after a few seconds. The interval between lines then doubles up to one minute. Nothing is
    printed when all items are done.

    Attributes:
        task: What the job does.
        unit: What the items are called.
        write: Prints a line.
        clock: Returns the time in seconds.
        next_at: Time from which on the next line may be printed.
        interval: Seconds between the last line and the next.
        starts: First report of each stage, to compute its speed.
    """

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
    """Format a speed as '3.2 questions/s'; empty if the rate is 0, which means unknown."""
    if rate <= 0:
        return ""
    number = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{number} {unit}/s"


def format_progress_line(task: str, done: int, total: int, unit: str, rate: float, pace: str = "") -> str:
    """Format progress as 'labeling: 120 of 1,000 questions, 3.2 questions/s, 4 min left'.

    Args:
        task: What is done.
        done: Number of items that are done.
        total: Number of all items.
        unit: What the items are called.
        rate: Items per second. If it is 0 (unknown), speed and remaining time are left out.
        pace: Text that replaces the speed.
    """
    parts = [f"{task}: {done:,} of {total:,} {unit}"]
    if pace or rate > 0:
        parts.append(pace or format_pace(rate, unit))
    if rate > 0:
        parts.append(f"{format_duration((total - done) / rate)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format a duration as '40 s', '4 min' or '2.5 h'."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"


@contextmanager
def show_waiting(task: str, interval: float = WAITING_LINE_SECONDS) -> Iterator[None]:
    """Show that a job without countable steps is running: a clock on a terminal, otherwise lines on stderr.

    Output goes to what sys.stderr is now, because code that silences libraries may replace it while the job runs.
    """
    console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
    with _show_clock(console, task) if console.is_terminal else _print_seconds(console, task, interval):
        yield


@contextmanager
def _show_clock(console: Console, task: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), description, TimeElapsedColumn(), console=console, transient=True) as bar:
        bar.add_task(task, total=None)
        yield


@contextmanager
def _print_seconds(console: Console, task: str, interval: float) -> Iterator[None]:
    """Print the elapsed seconds at regular intervals from a background thread."""
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
    """Show the progress of arbitration, the choice between answers with and without passages.

    If `arbiter` is None, the yielded callback shows nothing.
    """
    if arbiter is None:
        yield lambda done, total: None
        return
    with show_progress("arbitrating answers", "questions") as show:
        yield lambda done, total: show(done, total)
