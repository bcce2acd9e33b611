"""Paths as they come from a command line."""

from __future__ import annotations

from pathlib import Path

from knowgate.doors import user_path
from knowgate.errors import BadSetting
from knowgate.postgres import DatabaseAddress, is_postgres, read_database_address


def path(text: str) -> Path:
    """A path from the command line. An empty one, as of an unset shell variable, would mean this folder."""
    if not text.strip():
        raise BadSetting("a path on the command line is empty: name a folder or file ('.' is this folder).")
    return user_path(text)


def log_place(text: str) -> Path | DatabaseAddress:
    """Where a log is: a path, or a database whose address begins with postgresql://."""
    return read_database_address(text) if is_postgres(text) else path(text)


def place_name(text: str) -> str:
    """The same, as a text."""
    return text if is_postgres(text) else str(path(text))
