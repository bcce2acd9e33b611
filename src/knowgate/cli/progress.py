"""The progress bar of long jobs that go through questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Show = Callable[[int, int, str], None]


@contextmanager
def question_bar(what: str, console: Console) -> Iterator[Show]:
    """Gives a function that takes how many are done, how many there are, and the pace in words."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, pace="")

        def show(done: int, total: int, pace: str) -> None:
            progress.update(task, completed=done, total=total, pace=pace)

        yield show
