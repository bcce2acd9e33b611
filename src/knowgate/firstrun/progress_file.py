"""Which steps of a first run are done: `start.json` in its folder. Done is what was done with the same things."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.doors import read_json
from knowgate.errors import ArtefactError, BadInput, KnowgateError
from knowgate.files import check_own, sha256_text, write_json
from knowgate.firstrun.wishes import Wishes
from knowgate.typed import read_record

Work = Callable[[], dict[str, Any]]
Leaves = Callable[[dict[str, Any]], Sequence[Path]]  # files and folders of a step, by what it came to
FILE, INDEX, VERSION = "start.json", "index", 1


@dataclass(frozen=True)
class Record:
    """What the file holds. steps: by name, what each came to, with the key of what it was made from."""

    version: int
    wishes: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class ProgressFile:
    """Written anew after every step, whole or not at all."""

    folder: Path
    wishes: dict[str, Any]
    steps: dict[str, dict[str, Any]]

    def step(self, name: str, made_from: tuple[object, ...], work: Work, leaves: Leaves) -> dict[str, Any]:
        """What the step comes to: as it is on record, if what it leaves is still there, or worked out now and kept."""
        key = sha256_text(*map(str, made_from))[:16]
        found = self.steps.get(name)
        if found is None or found.get("key") != key or not all(path.exists() for path in leaves(found)):
            self.steps[name] = {**work(), "key": key}
            self.save()
        return self.steps[name]

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Wishes are on record from here on, whatever interrupts; those that turn out wrong are taken back."""
        file = self.folder / FILE
        before = file.read_bytes() if file.is_file() else None
        self.save()
        try:
            yield
        except KnowgateError:
            file.unlink() if before is None else file.write_bytes(before)
            raise

    def save(self) -> None:
        write_json(self.folder / FILE, {"version": VERSION, "wishes": self.wishes, "steps": self.steps})


def open_progress(folder: Path, wishes: Wishes) -> ProgressFile:
    """That of this folder with the wishes of now, or a new one; a folder of other things is refused. Writes nothing."""
    check_own(folder, [FILE, INDEX, f".{INDEX}.lock"], "a first run's")
    found = earlier(folder)
    return ProgressFile(
        folder, wishes.record(), {name: dict(step) for name, step in found.steps.items()} if found else {}
    )


def earlier(folder: Path) -> Record | None:
    """What an earlier start left in this folder."""
    file = folder / FILE
    if not file.is_file():
        return None
    advice = f"Delete {file}: labels are kept, and the rest is soon made again."
    try:
        found = read_record(Record, read_json(file), str(file), others=True)
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}. {advice}") from None
    if found.version != VERSION:
        raise ArtefactError(f"{file} was written by another version of knowgate. {advice}")
    return found
