"""Stop work in another thread if nobody waits for its result any more, such as a generation after a disconnect.

The caller starts the work in a context that has a flag. The work checks the flag at short intervals, such as before each
token.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

_PAUSE: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("pause", default=None)
_FLAG: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("stop_flag", default=None)


class StopError(Exception):
    """The work was stopped because nobody waits for its result."""


@contextlib.contextmanager
def open_stoppable_context() -> Iterator[contextvars.Context]:
    """Yield a context for running work. At the end of the block, the work is told to stop.

    Example:
        >>> with open_stoppable_context() as context:
        ...     context.run(check_stop_flag)  # somebody still waits, so nothing happens
        >>> context.run(check_stop_flag)
        Traceback (most recent call last):
        ...
        knowgate.core.stop_flag.StopError: nobody waits for the result
    """
    context = contextvars.copy_context()
    flag = threading.Event()
    context.run(_FLAG.set, flag)
    try:
        yield context
    finally:
        flag.set()


@contextlib.contextmanager
def pause_at_checks(pause: Callable[[], None]) -> Iterator[None]:
    """Call `pause` each time that the work in the `with` body checks its stop flag. `pause` may run other work."""
    token = _PAUSE.set(pause)
    try:
        yield
    finally:
        _PAUSE.reset(token)


def check_stop_flag() -> None:
    """Let more urgent work run first (`pause_at_checks`), then raise StopError if nobody waits for the current work."""
    pause = _PAUSE.get()
    if pause is not None:
        pause()
    flag = _FLAG.get()
    if flag is not None and flag.is_set():
        raise StopError("nobody waits for the result")
