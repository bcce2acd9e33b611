"""That something goes on which has no steps to count: a clock on a terminal, elsewhere a line now and then.

Knows clocks and streams; nothing of what is waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY = 5.0  # seconds between two lines


@contextmanager
def waiting(what: str, every: float = EVERY) -> Iterator[None]:
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
