"""The files of a folder, however deep it is; what is no ordinary file is named, never opened.

Knows nothing of what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Found:
    """Paths inside the folder. problems: why what should have been read (a folder, a pipe, a dead link) was not."""

    files: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def find_files(folder: Path, suffixes: tuple[str, ...]) -> Found:
    """Every file but hidden ones, in the order of paths. Links to files are followed, links to folders are not.

    suffixes: of files that are missed where they are no ordinary ones.
    """
    found, waiting = Found(), [""]
    while waiting:  # a list, not recursion, which ends at a depth of a thousand
        inside = waiting.pop()
        try:
            entries = sorted(_visible(folder, inside))
        except OSError as error:
            found.problems[inside or "."] = f"the folder cannot be read: {error.strerror}"
            continue
        for name, kind in entries:
            path = f"{inside}{name}"
            if kind == "folder":
                waiting.append(f"{path}/")
            elif kind == "file":
                found.files.append(path)
            elif name.lower().endswith(suffixes):
                found.problems[path] = kind
    found.files.sort()
    return found


def _visible(folder: Path, inside: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder / inside) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                yield entry.name, _kind(entry)


def _kind(entry: os.DirEntry[str]) -> str:
    """'file', 'folder', or why it is neither."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        if entry.is_symlink():
            return "a link to a folder, which is not followed" if entry.is_dir() else "a link that leads nowhere"
    except OSError as error:  # links in a circle, say
        return f"cannot be looked at: {error.strerror}"
    return "not an ordinary file (a pipe, a socket or a device)"
