"""Atomic files and folders, file locks, JSON Lines, checksums, and the cache folder."""

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

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_LINE_CHARS = 64 << 20  # a compressed file can contain a line that does not fit into memory
INVALID_UTF8 = re.compile("[\udc80-\udcff]")  # invalid bytes, as the error handler `surrogateescape` decodes them
PARTIAL_SUFFIX = ".part"  # ends the names of files and folders that are still being written


def cache_dir() -> Path:
    """Return the cache folder. Default: `knowgate` in the user's cache folder. KNOWGATE_CACHE overrides it."""
    chosen = os.environ.get("KNOWGATE_CACHE")
    if chosen:
        return expand_path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "knowgate"
    except RuntimeError:
        raise BadSetting(
            "cannot create the cache folder: this user has no home folder. Set the environment variable "
            "KNOWGATE_CACHE to a folder."
        ) from None


# --- checksums ------------------------------------------------------------------------------------


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file. The cache folder keeps the result until the file changes."""
    stat = path.stat()
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    cached = cache_dir() / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if cached.is_file():
        return cached.read_text(encoding="ascii")
    digest = sha256_file(path)
    write_text(cached, digest)
    return digest


def sha256_text(*texts: str) -> str:
    """Return the SHA-256 of several texts. Their boundaries count: ('ab', 'c') and ('a', 'bc') differ."""
    return sha256_texts(texts)


def sha256_texts(texts: Iterable[str]) -> str:
    """Return the SHA-256 of several texts, read one at a time."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")  # JSON can contain lone surrogates
        digest.update(len(data).to_bytes(8, "big") + data)  # the length marks where each text ends
    return digest.hexdigest()


# --- atomic writes --------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file to replace `path` at the end of the `with` block.

    After an error, `path` stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise BadInput(f"cannot write the file '{path}': a folder with this name exists. Choose another name.")
    with _name_target(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(mode)  # mkstemp makes private files
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _name_target(path: Path) -> Iterator[None]:
    """Replace the temporary file in the OS errors of a `with` block by `path`, which the user knows."""
    try:
        yield
    except shutil.Error as error:
        _source, _target, message = error.args[0][0]  # the first file that could not be copied
        raise OSError(errno.EIO, str(message), str(path)) from error
    except OSError as error:
        folder = path.absolute().parent
        prefix = str(folder / f".{path.name}.")  # the path of a temporary file or folder begins like this
        failed = str(error.filename or prefix)  # the error names no file if the disk is full
        if error.errno is None or not failed.startswith(prefix):
            raise
        # Example: if `path` is /a/gate, the temporary file /a/.gate.x1.part/data.bin becomes /a/gate/data.bin.
        _temporary_name, *inside = Path(failed).relative_to(folder).parts
        raise OSError(error.errno, error.strerror, str(path.joinpath(*inside))) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically, without changing line ends."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Write an indented JSON file atomically, with these file permissions."""
    with atomic_file(path, mode=mode) as file:
        file.write((json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())


def create_private_file(path: Path) -> None:
    """Create an empty file for its owner only. An existing file stays unchanged."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def link_or_copy(source: Path, target: Path) -> None:
    """Create a symbolic link to a file, or copy the file if links fail."""
    try:
        target.symlink_to(source)
    except OSError:  # Windows requires a privilege for links
        shutil.copyfile(source, target)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Make a temporary folder to replace `target` at the end of the `with` block.

    After an error, `target` stays unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _name_target(target), exclusive_writer(target):
        _recover(target)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=PARTIAL_SUFFIX))
        try:
            yield temporary
            _swap(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _backup_path(target: Path) -> Path:
    """Return the path to which the previous folder is renamed while the new one takes its place."""
    return target.with_name(f".{target.name}.old{PARTIAL_SUFFIX}")


def _recover(target: Path) -> None:
    """Clean up after a process was killed while writing the folder. The previous folder is restored if necessary."""
    if _backup_path(target).exists() and not target.exists():
        _backup_path(target).replace(target)
    for path in target.parent.iterdir():
        if path.name.startswith(f".{target.name}.") and path.name.endswith(PARTIAL_SUFFIX) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    """Replace the target folder by the new one. The previous folder is deleted last, so `_recover` can restore it."""
    new.chmod(0o755)  # mkdtemp makes private folders
    if target.exists():
        target.replace(_backup_path(target))
    new.replace(target)
    shutil.rmtree(_backup_path(target), ignore_errors=True)


def check_replaceable(path: Path, marker: str, kind: str) -> None:
    """Raise ArtifactError if writing a folder would overwrite content of another kind.

    Args:
        path: The folder to be written.
        marker: File that every folder of this kind contains.
        kind: The kind of folder, for the message ("a fitted gate").
    """
    if path.exists() and not (path / marker).is_file() and (path.is_file() or any(path.iterdir())):
        raise ArtifactError(f"'{path}' already exists and is not {kind}. It was not overwritten. Choose another `out`.")


def check_output_folder(path: Path, markers: Collection[str], kind: str, argument: str = "out") -> None:
    """Raise ArtifactError if the output folder holds unrelated content.

    Args:
        path: The folder to write to. It may be missing or empty.
        markers: Names of files, one of which exists in every folder of the expected kind.
        kind: The expected kind of folder, for the message ("a label run").
        argument: Name of the argument that the message tells the user to change.
    """
    if path.exists() and not path.is_dir():
        raise ArtifactError(f"'{path}' is a file, not a folder. Choose another `{argument}`.")
    if path.exists() and not any((path / name).exists() for name in markers) and any(_iter_content(path)):
        raise ArtifactError(
            f"the folder '{path}' contains other files and is not {kind}. Choose an empty folder for `{argument}`."
        )


def _iter_content(folder: Path) -> Iterator[Path]:
    """Yield the content of a folder, except lock files and partial files that killed processes left behind."""
    return (path for path in folder.iterdir() if path.name != ".lock" and not path.name.endswith(PARTIAL_SUFFIX))


# --- locks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def exclusive_writer(target: Path) -> Iterator[None]:
    """Make sure that only this process writes to `target` inside the `with` block.

    Raises:
        BadSetting: Another process is writing to `target`.
    """
    lock = target.with_name(f".{target.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(lock, wait=False))
        except BlockingIOError:
            raise BadSetting(f"another process is writing to '{target}'. Wait until it ends, or stop it.") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows cannot remove open files
                lock.unlink()


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock against other processes. On Windows, nothing is locked.

    Args:
        path: The lock file.
        wait: Wait until the lock is free; otherwise raise BlockingIOError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have deleted the lock file before we got the lock. Our lock is then on a deleted
            # file, which other processes cannot see, so we try again with a new lock file.
            if fcntl is None or _is_file_at(path, file):
                yield
                return


def _is_file_at(path: Path, file: BinaryIO) -> bool:
    """Return whether the open file is still at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# --- lines ----------------------------------------------------------------------------------------


def find_last_line_end(path: Path) -> int:
    """Return the byte offset after the last newline, or 0. Text after this offset is an incomplete line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            index = file.read(end - start).rfind(b"\n")
            if index >= 0:
                return start + index + 1
            end = start
    return 0


def read_jsonl(path: Path, *, allow_surrogates: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each non-empty line of a JSON Lines file.

    Args:
        path: The file, which may be compressed with gzip (.gz).
        allow_surrogates: Accept lone surrogates; see `parse_json`.

    Raises:
        BadInput: A line is not UTF-8 text or not a JSON object.
    """
    for number, line in read_lines(path):
        where = f"{path} line {number}"
        if INVALID_UTF8.search(line):
            raise BadInput(f"{where} is not UTF-8 text. Convert the file to UTF-8, for instance with iconv.")
        record = parse_json(line, where, allow_surrogates=allow_surrogates)
        if not isinstance(record, dict):
            raise BadInput(f"{where} is not a JSON object. Write one JSON object per line.")
        yield number, record


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) for each non-empty line. Files named *.gz are decompressed."""
    try:
        # Invalid bytes become lone surrogates here. Callers find them with `INVALID_UTF8` and can name the line.
        with open_text(path, errors="surrogateescape") as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARS + 1):  # never holds a huge line in memory
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    raise BadInput(f"{path} line {number} is longer than {MAX_LINE_CHARS:,} characters. Split it.")
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise BadInput(f"{path} is not a complete gzip file. Download or compress it again.") from None


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Open a UTF-8 text file for reading. Files named *.gz are decompressed."""
    check_regular_file(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors)
    return path.open(encoding="utf-8-sig", errors=errors)
