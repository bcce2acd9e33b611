"""Files that are either whole or absent: atomic writes, JSON lines, the cache folder, checksums.

Knows nothing of what is stored.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from knowgate.core.validation import check_regular_file, expand_path, parse_json
from knowgate.errors import ArtifactError, BadInput, BadSetting

MAX_LINE_CHARS = 64 << 20  # characters of one record; a packed file can hold a line that no memory can
INVALID_UTF8 = re.compile("[\udc80-\udcff]")  # how `surrogateescape` writes such bytes

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL_SUFFIX = ".part"  # how names of files and folders end that are being written


def cache_dir() -> Path:
    """Where weights and conversions are kept: KNOWGATE_CACHE, else the user's cache folder."""
    chosen = os.environ.get("KNOWGATE_CACHE")
    if chosen:
        return expand_path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "knowgate"
    except RuntimeError:
        raise BadSetting("there is no home folder to keep a cache in: set KNOWGATE_CACHE to a folder.") from None


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256_file(file: Path) -> str:
    """The same, remembered by path, size and time: hashing a gigabyte at every start would be slow."""
    stat = file.stat()
    identity = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    note = cache_dir() / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if note.is_file():
        return note.read_text(encoding="ascii")
    found = sha256_file(file)
    write_text(note, found)  # whole or not at all: another process may be reading it
    return found


def sha256_text(*texts: str) -> str:
    """Hash of several texts; their borders count."""
    return sha256_texts(texts)


def sha256_texts(texts: Iterable[str]) -> str:
    """The same of very many, which need not be in memory together."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")  # JSON can hold half a pair
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well; else the one that was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise BadInput(f"'{path}' is a folder; a file is to be written there. Choose another name.")
    with _named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX)
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


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A refusal of the system's names what was to be written: a full disk names nothing, and a temporary file's name
    tells nobody anything."""
    try:
        yield
    except shutil.Error as error:  # copying a folder gathers what the system refused, as (from, to, words)
        raise OSError(errno.EIO, str(error.args[0][0][2]), str(path)) from error
    except OSError as error:
        hidden = path.absolute().parent / f".{path.name}."
        if error.errno is None or not str(error.filename or hidden).startswith(str(hidden)):
            raise
        inside = Path(error.filename or hidden).relative_to(hidden.parent).parts[1:]
        raise OSError(error.errno, error.strerror, str(path.joinpath(*inside))) from error


def write_bytes(path: Path, data: bytes) -> None:
    """A whole file, or the one that was there."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """A whole file, or the one that was there; in UTF-8, with line ends as they are."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def check_replaceable(path: Path, marker: str, what: str) -> None:
    """Refuse to put a folder where something else is, which would be lost. marker: the file that tells such folders."""
    if path.exists() and not (path / marker).is_file() and (path.is_file() or any(path.iterdir())):
        raise ArtifactError(f"'{path}' exists and is not {what}; choose another --out.")


def check_output_folder(path: Path, markers: Collection[str], what: str, option: str = "--out") -> None:
    """Refuse to write into a folder of other things: not new, not empty, and without any of `markers`."""
    if path.exists() and not path.is_dir():
        raise ArtifactError(f"'{path}' is a file, not a folder; choose another {option}.")
    if path.exists() and not any((path / name).exists() for name in markers) and any(_there(path)):
        raise ArtifactError(f"'{path}' is not empty and not {what}; choose another {option}.")


def _there(folder: Path) -> Iterator[Path]:
    """What a folder holds but the lock of whoever writes to it, and what a process left that was killed."""
    return (path for path in folder.iterdir() if path.name != ".lock" and not path.name.endswith(PARTIAL_SUFFIX))


def find_last_line_end(path: Path) -> int:
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
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling that replaces `target` when the block ends well, and vanishes when it does not.

    One process at a time: another one is refused. What a process left that was killed meanwhile is cleared away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _named(target), exclusive_writer(target):
        _clear(target)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=PARTIAL_SUFFIX))
        try:
            yield temporary
            _swap(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _old(target: Path) -> Path:
    """Where the folder that was there is for the moment between two renames."""
    return target.with_name(f".{target.name}.old{PARTIAL_SUFFIX}")


def _clear(target: Path) -> None:
    """After a process that was killed: the earlier folder comes back, halves of new ones go."""
    if _old(target).exists() and not target.exists():
        _old(target).replace(target)
    for left in target.parent.iterdir():
        if left.name.startswith(f".{target.name}.") and left.name.endswith(PARTIAL_SUFFIX) and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    new.chmod(0o755)  # mkdtemp makes private folders; what lands is an ordinary one
    if target.exists():
        target.replace(_old(target))
    new.replace(target)
    shutil.rmtree(_old(target), ignore_errors=True)


@contextlib.contextmanager
def exclusive_writer(target: Path) -> Iterator[None]:
    """Be the one process that makes `target`; refused while another does."""
    lock = target.with_name(f".{target.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, wait=False))
        except BlockingIOError:
            raise BadSetting(f"another process is writing to '{target}'; wait for it or stop it.") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows keeps what is open
                lock.unlink()


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock between processes, so that two of them do not make the same thing at once.

    wait: until whoever holds it lets go; else BlockingIOError. Systems without POSIX locks lock nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fcntl is None or _is_at(path, file):
                yield
                return


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file still has its name: who held the lock before may have taken the file away."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def read_jsonl(path: Path, *, halves: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of each non-empty line; a broken line is named by its number. halves: as `parse_json`."""
    for number, line in read_lines(path):
        where = f"{path} line {number}"
        if INVALID_UTF8.search(line):
            raise BadInput(f"{where} is not UTF-8 text: convert it, as with iconv.")
        record = parse_json(line, where, halves=halves)
        if not isinstance(record, dict):
            raise BadInput(f"{where} is not a JSON object.")
        yield number, record


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line that is not empty, gzip unpacked. Bytes that are no UTF-8 match `NOT_UTF8`."""
    try:
        with open_text(path, errors="surrogateescape") as file:
            lines = iter(lambda: file.readline(MAX_LINE_CHARS + 1), "")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE_CHARS:
                    raise BadInput(f"{path} line {number} is longer than {MAX_LINE_CHARS:,} characters.")
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise BadInput(f"{path} is not a whole gzip file: get or pack it again.") from None


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Open a text file, unpacking gzip; a byte order mark is no part of it."""
    check_regular_file(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors)
    return path.open(encoding="utf-8-sig", errors=errors)
