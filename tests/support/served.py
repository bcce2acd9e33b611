"""`knowgate serve` as a process of its own, on a free port: for signals, workers and sudden ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.processes import PATIENCE, child, until


@dataclass
class Served:
    """said: the file that its output goes to."""

    process: subprocess.Popen[bytes]
    address: str
    said: Path

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@contextmanager
def served(folder: Path, *words: str, is_up: bool = True, module: str = "knowgate") -> Iterator[Served]:
    """In this folder. is_up: it is waited for until it answers. module: what is run instead of knowgate."""
    port, said = free_port(), folder / "serve.log"
    command = [sys.executable, "-m", module, "serve", "--port", str(port), *words]
    with (
        said.open("wb") as file,
        child(
            command, cwd=folder, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ) as process,
    ):
        found = Served(process, f"http://127.0.0.1:{port}", said)
        if is_up:
            until(lambda: is_healthy(found.address), process)
        yield found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
