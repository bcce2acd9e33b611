"""Integrity checks of artifact folders, such as fitted gates and indexes that knowgate saved.

An artifact folder may contain only regular files and no pickles, and its files must match their recorded checksums.
Callers pass a function that makes the error to raise, so that every kind of artifact has its own message.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from knowgate.core.files import sha256_file
from knowgate.errors import KnowgateError

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz"})  # may run code
LARGE_FILE_BYTES = 64 << 20  # only samples of larger files are hashed, so that opening an artifact stays quick
DIGEST_SAMPLES, DIGEST_SAMPLE_BYTES = 64, 1 << 16
ErrorFactory = Callable[[str], KnowgateError]  # makes the error to raise from a description of the problem


def check_artifact_folder(folder: Path, make_error: ErrorFactory) -> None:
    """Check that a saved folder is safe to load.

    Raises:
        KnowgateError: The folder contains a link to outside, a special file, or a file that can run code when it is
            loaded. `make_error` makes the error from a description of the problem.
    """
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if links_outside(path, folder):
            raise make_error(f"'{name}' is a link to a file outside the folder")
        if not path.is_file():
            raise make_error(f"'{name}' is not a regular file")
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise make_error(f"'{name}' may be a pickle file. Such a file can run code, and knowgate never writes one")


def links_outside(path: Path, folder: Path) -> bool:
    """Return whether a path is a symbolic link out of the folder, or a circular link."""
    target = Path(os.path.realpath(path))  # `Path.resolve` raises on circular links
    is_circular = target.is_symlink()  # realpath stops at a link if the links form a circle
    return path.is_symlink() and (is_circular or not target.is_relative_to(os.path.realpath(folder)))


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder, without following links."""
    for parent, folders, names in os.walk(folder):
        # os.walk lists links to folders among the folders.
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in sorted([*names, *links]):
            yield Path(parent) / name


def compute_digests(folder: Path, *, exclude: Collection[str] = ()) -> dict[str, str]:
    """Return the digest of each file below a folder, by relative path."""
    paths = {path.relative_to(folder).as_posix(): path for path in walk_files(folder)}
    return {name: compute_digest(path) for name, path in sorted(paths.items()) if name not in exclude}


def check_digests(folder: Path, digests: Mapping[str, str], make_error: ErrorFactory) -> None:
    """Raise an error if a file is missing or differs from its recorded digest."""
    for name, digest in digests.items():
        path = resolve_inside(folder, name, make_error)
        if not path.is_file():
            raise make_error(f"'{name}' is missing")
        if compute_digest(path) != digest:
            raise make_error(f"'{name}' was changed or damaged")


def resolve_inside(folder: Path, name: str, make_error: ErrorFactory) -> Path:
    """Return the path of a file in a folder. Names leading out of the folder raise an error."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith(("/", "~")) or ".." in parts or "\\" in name or "\0" in name or ":" in name:
        raise make_error(f"'{name[:80]}' is not a file name inside '{folder.name}'")
    return folder.joinpath(*parts)


def compute_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Of large files, only the length and some blocks are hashed."""
    size = path.stat().st_size
    if size <= LARGE_FILE_BYTES:
        return sha256_file(path)
    digest = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for number in range(DIGEST_SAMPLES):  # the first block is at the start of the file, the last at its end
            file.seek((size - DIGEST_SAMPLE_BYTES) * number // (DIGEST_SAMPLES - 1))
            digest.update(file.read(DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()
