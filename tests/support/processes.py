"""Processes of a test: waited for by what they do and not by the clock, and never left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

PATIENCE = 300.0  # seconds after which something hangs; a slow or busy machine is not a fault


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running process; when the block ends, however it ends, it and its own children are dead and reaped."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the process with its group, reap it, close its pipes."""
    if os.name == "posix":
        with suppress(ProcessLookupError):  # all of them are gone
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):  # of what was not written to it yet
                pipe.close()


def python(code: str, *arguments: str, **options: Any) -> str:
    """What a piece of code prints in a fresh interpreter; its failure is this test's, with its own words."""
    command = [sys.executable, "-c", code, *arguments]
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **options) as run:
        out, err = run.communicate(timeout=PATIENCE)
        assert run.returncode == 0, err
        return str(out)


def until(reached: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until something is so; that the process ends before is a failure."""
    stop = time.monotonic() + PATIENCE
    while not reached():
        assert process is None or process.poll() is None, "the process ended before"
        assert time.monotonic() < stop, f"not reached in {PATIENCE:.0f} s"
        time.sleep(0.01)
