"""Progress of long jobs: a progress bar on a terminal, otherwise occasional lines on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.core.display import sanitize_text

FIRST_LINE_SECONDS, MAX_LINE_INTERVAL = 3.0, 60.0  # seconds before the first line, and at most between lines
MINUTE, HOUR = 60.0, 3600.0


class ProgressCallback(Protocol):
    """Callback for the progress reports of a job."""

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        """Report progress.

        Args:
            done: Number of items that are done.
            total: Number of all items.
            pace: Speed in words.
            stage: Name of the current stage of the job; empty if it has only one.
            unit: What the items are called, if different from the other stages.
        """

    def say(self, line: str) -> None:
        """Print a line of text that stays on the terminal above the progress bar."""


@contextmanager
def show_progress(task: str, unit: str, console: Console = STDERR_CONSOLE) -> Iterator[ProgressCallback]:
    """Show the progress of a job during the `with` block. Yields the callback for the job.

    Args:
        task: What the job does ("labeling").
        unit: What its items are called ("questions").
        console: Where to print.
    """
    if not console.is_terminal:
        yield ProgressLines(task, unit, lambda line: console.print(line, markup=False, highlight=False))
        return
    stage = TextColumn("{task.description}", markup=False)
    pace = TextColumn("{task.fields[pace]}", markup=False)
    columns = (stage, BarColumn(), MofNCompleteColumn(), pace, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield ProgressBars(task, bars)


@dataclass
class ProgressBars:
    """Shows progress on a terminal, with one bar for each stage of a job.

    Attributes:
        task: What the job does; name of the bar of a job without stages.
        bars: The progress display of rich.
        ids: Id that rich gave to the bar of each stage, by the name of the stage.
    """

    task: str
    bars: Progress
    ids: dict[str, TaskID] = field(default_factory=dict)

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        """Update the bar of a stage. The first report adds the bar."""
        name = sanitize_text(stage or self.task)
        if name not in self.ids:
            self.ids[name] = self.bars.add_task(name, total=None, pace="")
        self.bars.update(self.ids[name], completed=done, total=total, pace=pace)

    def say(self, line: str) -> None:
        self.bars.console.print(line, markup=False, highlight=False)


@dataclass
class ProgressLines:
    """Shows progress as lines of text, for output to a file or pipe.

    The interval between lines doubles, up to one minute.

    Attributes:
        task: What the job does.
        unit: What the items are called.
        write: Prints a line.
        clock: Returns the time in seconds.
        next_at: Time from which on the next line may be printed.
        interval: Seconds between the last line and the next.
        starts: First report of each stage, from which the remaining time is estimated: how many items were already done
            (in an earlier run), and the time.
    """

    task: str
    unit: str
    write: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    next_at: float = 0.0
    interval: float = field(default_factory=lambda: FIRST_LINE_SECONDS)
    starts: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_at = self.clock() + self.interval

    def __call__(self, done: int, total: int, pace: str = "", *, stage: str = "", unit: str = "") -> None:
        """Print the progress and the remaining time, if a line is due."""
        now = self.clock()
        name = stage or self.task
        first_done, first_time = self.starts.setdefault(name, (done, now))
        if now < self.next_at or done >= total:
            return
        self.interval = min(2 * self.interval, MAX_LINE_INTERVAL)
        self.next_at = now + self.interval
        parts = [f"{name}: {done:,} of {total:,} {unit or self.unit}", pace]
        if done > first_done:
            seconds_per_item = (now - first_time) / (done - first_done)
            parts.append(f"{format_duration((total - done) * seconds_per_item)} left")
        self.write(", ".join(filter(None, parts)))

    def say(self, line: str) -> None:
        self.write(line)


def format_duration(seconds: float) -> str:
    """Format a duration as '40 s', '4 min' or '2.5 h'."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"
