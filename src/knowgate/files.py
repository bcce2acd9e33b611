"""Files that are either whole or absent: atomic writes, JSON lines, the cache folder, checksums.

Knows nothing of what is stored.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from knowgate.doors import check_regular, parse_json
from knowgate.errors import ArtefactError, BadInput

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_dir() -> Path:
    """Where weights and conversions are kept: KNOWGATE_CACHE, else the user's cache folder."""
    chosen = os.environ.get("KNOWGATE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "knowgate"


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(*texts: str) -> str:
    """Hash of several texts; their borders count."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")  # JSON can hold half a pair
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well; else the one that was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise BadInput(f"'{path}' is a folder; a file is to be written there. Choose another name.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes private files
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """A whole file, or the one that was there."""
    with new_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """A whole file, or the one that was there; in UTF-8, with line ends as they are."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def check_replaceable(path: Path, marker: str, what: str) -> None:
    """Refuse to put a folder where something else is, which would be lost. marker: the file that tells such folders."""
    if path.exists() and not (path / marker).is_file() and (path.is_file() or any(path.iterdir())):
        raise ArtefactError(f"'{path}' exists and is not {what}; choose another --out.")


def check_own(path: Path, markers: Collection[str], what: str, option: str = "--out") -> None:
    """Refuse to write into a folder of other things: not new, not empty, and without any of `markers`."""
    if path.exists() and not path.is_dir():
        raise ArtefactError(f"'{path}' is a file, not a folder; choose another {option}.")
    if path.exists() and not any((path / name).exists() for name in markers) and any(_there(path)):
        raise ArtefactError(f"'{path}' is not empty and not {what}; choose another {option}.")


def _there(folder: Path) -> Iterator[Path]:
    """What a folder holds but the lock that whoever writes to it holds."""
    return (path for path in folder.iterdir() if path.name != ".lock")


def whole_lines(path: Path) -> int:
    """The length of a file up to its last line end; what stands behind it was being written when a process died."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                return start + place + 1
            end = start
    return 0


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling that replaces `target` when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield temporary
        _swap(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    new.chmod(0o755)  # mkdtemp makes private folders; what lands is an ordinary one
    if not target.exists():
        new.replace(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old.")) / "old"
    target.replace(old)
    new.replace(target)
    shutil.rmtree(old.parent, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock between processes, so that two of them do not make the same thing at once.

    wait: until whoever holds it lets go; else BlockingIOError. Systems without POSIX locks lock nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of each non-empty line; a broken line is named by its number."""
    try:
        with open_text(path) as lines:
            yield from _records(lines, path)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a UTF-8 text file.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise BadInput(f"{path} is not a whole gzip file.") from None


def open_text(path: Path) -> TextIO:
    """Open a text file, unpacking gzip."""
    check_regular(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _records(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path} line {number}")
        if not isinstance(record, dict):
            raise BadInput(f"{path} line {number} is not a JSON object.")
        yield number, record
