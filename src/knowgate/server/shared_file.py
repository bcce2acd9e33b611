"""An SQLite file that several workers use (WAL). Knows how one is opened; not what is in it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

TRIES = 50
PAUSE = 0.1  # seconds


def open_shared(path: Path, schema: str, *, seconds: float, safe: bool) -> sqlite3.Connection:
    """seconds: for another one's turn. safe: what was written survives a power cut, too, not only a killed process."""
    for left in reversed(range(TRIES)):
        file = sqlite3.connect(path, timeout=seconds)
        try:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA secure_delete = ON")  # what is forgotten does not linger in free pages
            file.execute(f"PRAGMA synchronous = {'FULL' if safe else 'NORMAL'}")
            file.executescript(schema)
            return file
        except sqlite3.Error as error:
            file.close()
            if not left or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(PAUSE)  # nobody waits for his turn to make a file new, whatever the time given
    raise AssertionError("one of the tries was the last")
