"""The decisions that a server kept (`serve --decisions FILE`), as lines like those of `decide --json`.

Knows the file; not what a line must say to be of use.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from knowgate.doors import check_regular
from knowgate.errors import BadInput

HEADER = b"SQLite format 3\0"


def is_decisions(path: Path) -> bool:
    """Whether this is a database, not lines of text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER


def read_decisions(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered, in the order they were taken. The file is only read; a server may be writing to it."""
    check_regular(path)
    try:
        file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            rows = file.execute("SELECT record FROM decisions ORDER BY at, id")
            yield from ((number, str(record)) for number, (record,) in enumerate(rows, start=1))
        finally:
            file.close()
    except sqlite3.Error as error:
        raise BadInput(
            f"'{path}' is no file of decisions ({error}). A server keeps one: knowgate serve --decisions FILE"
        ) from None
