"""Paths as they come from a command line."""

from __future__ import annotations

from pathlib import Path

from knowgate.doors import user_path
from knowgate.errors import BadSetting


def path(text: str) -> Path:
    """A path from the command line. An empty one, as of an unset shell variable, would mean this folder."""
    if not text.strip():
        raise BadSetting("a path on the command line is empty: name a folder or file ('.' is this folder).")
    return user_path(text)
