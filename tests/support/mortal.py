"""Commands in processes that die: killed at a chosen moment, or on a disk that is full from a chosen write on.

`python -m tests.support.mortal` imports what commands need and then forks a process for each order it reads, so that
the moments chosen fall into the work and not into a second of imports. A moment is counted in touches: files below a
place that are opened, renamed, removed, folders that are made, locks that are taken. `Mortal` is its other end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import child

TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "sqlite3.connect"}
ROOM = 1 << 20  # bytes a command may print
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fate:
    """What befalls a command. place: part of the paths whose touches count.

    kill: die at this touch (0: from the start), `delay` seconds after it. full: from this touch on nothing can be
    written. largest: bytes a file may have.
    """

    place: str = ""
    kill: int | None = None
    delay: float = 0.0
    full: int | None = None
    largest: int | None = None


@dataclass(frozen=True)
class End:
    """How it went. code: None where it was killed. touches: of a command that came to its end."""

    code: int | None
    touches: int
    seconds: float
    words: str

    @property
    def was_killed(self) -> bool:
        return self.code is None


class Mortal:
    """Runs commands one after another."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def run(self, *arguments: object, cwd: Path, fate: Fate | None = None) -> End:
        order = {"arguments": [str(one) for one in arguments], "cwd": str(cwd), "fate": asdict(fate or Fate())}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks the others is gone"
        return End(**json.loads(line))


@contextmanager
def mortal(*modules: str, **environment: str) -> Iterator[Mortal]:
    """modules: what the commands to come will import."""
    command = [sys.executable, "-m", "tests.support.mortal", *modules]
    pipe = subprocess.PIPE
    with child(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment}) as process:
        yield Mortal(process)


def serve(modules: Sequence[str]) -> None:
    for module in modules:
        __import__(module)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        out.write(json.dumps(asdict(_carry_out(json.loads(line)))) + "\n")
        out.flush()


def _carry_out(order: dict[str, Any]) -> End:
    fate, start = Fate(**order["fate"]), time.perf_counter()
    ear, mouth = os.pipe()
    words, pen = os.pipe()
    fcntl.fcntl(pen, fcntl.F_SETPIPE_SZ, ROOM)  # no file: its size would be limited, too
    number = os.fork()
    if not number:
        os.close(ear)
        _live(order, fate, mouth, pen)
    os.close(mouth)
    os.close(pen)
    if fate.kill == 0:
        time.sleep(fate.delay)
        os.kill(number, signal.SIGKILL)
    with os.fdopen(ear) as told:
        said = told.readline()
        if said == "now\n":
            time.sleep(fate.delay)
            os.kill(number, signal.SIGKILL)
    status = os.waitpid(number, 0)[1]
    died = os.WIFSIGNALED(status)
    with os.fdopen(words, encoding="utf-8", errors="replace") as printed:
        text = printed.read()
    touches = int(said) if said.strip().isdigit() else 0
    return End(None if died else os.WEXITSTATUS(status), touches, time.perf_counter() - start, text)


def _live(order: dict[str, Any], fate: Fate, mouth: int, pen: int) -> None:
    """The forked process; never comes back."""
    from knowgate.cli.main import run

    os.chdir(order["cwd"])
    os.dup2(pen, 1)
    os.dup2(pen, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", buffering=1) for number in (1, 2))
    count = _watch(fate, mouth)
    if fate.largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fate.largest, resource.RLIM_INFINITY))
    try:
        code = run(order["arguments"])
    except BaseException:  # noqa: BLE001 - whatever it is, the test shall see it
        traceback.print_exc()
        os._exit(99)
    os.write(mouth, f"{len(count)}\n".encode())
    os._exit(code)


def _watch(fate: Fate, mouth: int) -> list[str]:
    """The touches so far; the fate strikes among them."""
    touches: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in TOUCHES or not arguments or fate.place not in str(arguments[0]):
            return
        touches.append(event)
        if len(touches) == fate.kill:
            if not fate.delay:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(mouth, b"now\n")
        if fate.full is not None and len(touches) >= fate.full and _takes_room(event, arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hook)
    return touches


def _takes_room(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "os.mkdir" or (event == "open" and bool(arguments[2] & WRITING))


if __name__ == "__main__":
    serve(sys.argv[1:])
