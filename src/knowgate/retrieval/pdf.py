"""The text of a PDF through pypdf (extra `pdf`). Scanned pages have no text: knowgate does no OCR.

pypdf runs in a process of its own, which is ended when a file takes too long; the next file gets a new one.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, MissingExtra

SECONDS = 60.0  # of one file; a thousand pages take about 30
WORKER = Path(__file__).with_name("pdf_worker.py")


def read_pdf(path: Path, *, seconds: float = SECONDS) -> str:
    """The text of all pages, a blank line between pages."""
    try:
        import pypdf  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(f"reading {path}", "pdf") from error
    reply = _reader().read(path, seconds)
    if reply.get("problem") == "encrypted":
        raise BadInput(f"{path} is encrypted. Save it without a password or take it out of the folder.")
    if "text" not in reply:
        why = reply.get("problem") or "its reader ended"
        raise BadInput(f"{path} cannot be read as PDF: {why}. Repair it or take it out of the folder.")
    return reply["text"]


class Reader:
    """The process that reads, started when there is something to read; one file at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path, seconds: float) -> dict[str, str]:
        """What the worker says of a file. It is ended when it takes longer than that."""
        with self._lock:
            process = self._running()
            late = threading.Event()
            clock = threading.Timer(seconds, _end, (process, late))
            clock.start()
            try:
                reply = self._asked(process, path)
            finally:
                clock.cancel()
            if late.is_set():
                self.close()
                return {"problem": f"it took longer than {seconds:g} seconds"}
            return reply

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> Any:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # -P: this folder's html.py must not stand for Python's
            command = [sys.executable, "-P", str(WORKER)]
            self._process = subprocess.Popen(  # our own file, in this Python  # nosec B603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process

    def _asked(self, process: Any, path: Path) -> dict[str, str]:
        try:
            process.stdin.write(json.dumps(str(path.absolute())).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it was ended meanwhile
            line = b""
        if not line:
            self.close()
            return {}
        reply: dict[str, str] = json.loads(line)
        return reply


def _end(process: Any, late: threading.Event) -> None:
    late.set()
    process.kill()


@cache
def _reader() -> Reader:
    reader = Reader()
    atexit.register(reader.close)
    return reader
