"""The door for folders that knowgate wrote: only plain files that lie inside, no code, nothing changed since.

Knows names, links and digests; not what the files mean. A refusal is the caller's kind of error, in the caller's words.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from knowgate.core.files import sha256_file
from knowgate.errors import KnowgateError

PICKLE_SUFFIXES = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz"}
)  # run code when loaded
LARGE_FILE_BYTES = (
    64 << 20
)  # bytes; of larger files samples are compared, or opening them would take as long as reading them
DIGEST_SAMPLES, DIGEST_SAMPLE_BYTES = 64, 1 << 16
ErrorFactory = Callable[[str], KnowgateError]


def check_artifact_folder(folder: Path, refusal: ErrorFactory) -> None:
    """Refuse links that lead out of the folder, what is no ordinary file, and what runs code when it is loaded."""
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if links_outside(path, folder):
            raise refusal(f"'{name}' is a link that leads out of the folder")
        if not path.is_file():
            raise refusal(f"'{name}' is not an ordinary file")
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise refusal(f"'{name}' is pickle or the like, which knowgate did not write there")


def links_outside(path: Path, folder: Path) -> bool:
    """Whether a link inside a folder leads to what lies elsewhere, or round in a circle."""
    real = Path(os.path.realpath(path))  # Path.resolve raises on circles
    return path.is_symlink() and (real.is_symlink() or not real.is_relative_to(os.path.realpath(folder)))


def walk_files(folder: Path) -> Iterator[Path]:
    """Everything below a folder but folders; links are named, not followed."""
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*names, *linked]))


def compute_digests(folder: Path, *, leave: Collection[str] = ()) -> dict[str, str]:
    """The digest of each file below a folder, by its name there."""
    names = {path.relative_to(folder).as_posix(): path for path in walk_files(folder)}
    return {name: compute_digest(path) for name, path in sorted(names.items()) if name not in leave}


def check_digests(folder: Path, wanted: Mapping[str, str], refusal: ErrorFactory) -> None:
    """Refuse a file that is missing or not the one that was written."""
    for name, expected in wanted.items():
        path = resolve_inside(folder, name, refusal)
        if not path.is_file():
            raise refusal(f"'{name}' is missing")
        if compute_digest(path) != expected:
            raise refusal(f"'{name}' was changed or damaged")


def resolve_inside(folder: Path, name: str, refusal: ErrorFactory) -> Path:
    """The file of this name in a folder; a name that would lead out of it is refused."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith(("/", "~")) or ".." in parts or "\\" in name or "\0" in name or ":" in name:
        raise refusal(f"'{name[:80]}' is no name of a file inside it")
    return folder.joinpath(*parts)


def compute_digest(path: Path) -> str:
    """sha256 of a file; of a large one of its length and of samples spread over it."""
    size = path.stat().st_size
    if size <= LARGE_FILE_BYTES:
        return sha256_file(path)
    found = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for number in range(DIGEST_SAMPLES):
            file.seek((size - DIGEST_SAMPLE_BYTES) * number // (DIGEST_SAMPLES - 1))
            found.update(file.read(DIGEST_SAMPLE_BYTES))
    return found.hexdigest()
