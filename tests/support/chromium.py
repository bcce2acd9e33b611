"""A page opened in a real browser, without a network."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE

BROWSER = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=10000",
    "--enable-logging=stderr",
    "--v=0",
]
needs_browser = pytest.mark.skipif(
    not os.access(BROWSER, os.X_OK), reason=f"{BROWSER} is not installed (apt-get install chromium)"
)


@dataclass(frozen=True)
class Opened:
    """The page after its scripts have run, and what it said to the console."""

    dom: str
    console: list[str]


def open_page(page: Path, profile: Path) -> Opened:
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return Opened(done.stdout, [said for said in done.stderr.splitlines() if "CONSOLE" in said])
