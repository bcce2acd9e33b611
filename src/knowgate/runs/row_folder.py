"""A folder of rows that grows batch by batch: a manifest, and one JSON line for each question.

Safe against being killed at any moment: rows are appended and flushed batch by batch, and a torn last line is cut off
when the folder is opened again. Knows nothing of what the rows say beyond their `id` and `error`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from knowgate.doors import read_json
from knowgate.errors import ArtefactError, BadSetting, KnowgateError
from knowgate.files import UNFINISHED, locked, read_jsonl, write_json, write_text


@dataclass(frozen=True)
class RowFolder:
    """Where rows are kept. Kinds of folders say how their files are called and which command makes them."""

    path: Path

    version: ClassVar[int]
    manifest_name: ClassVar[str]
    rows_name: ClassVar[str]
    what: ClassVar[str]
    command: ClassVar[str]

    # --- reading ----------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        file = self.path / self.manifest_name
        if not file.is_file():
            raise ArtefactError(
                f"'{self.path}' is not a {self.what}: it has no {self.manifest_name}. Make one: {self.command}"
            )
        manifest = read_json(file)
        if not isinstance(manifest, dict) or manifest.get("version") != self.version:
            written = manifest.get("version") if isinstance(manifest, dict) else None
            raise ArtefactError(
                f"'{self.path}' was written by another version of knowgate (format {written}, this one reads "
                f"{self.version}). Make a new folder: {self.command}"
            )
        return manifest

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row's record in file order, with its place; memory stays flat."""
        self.manifest()
        file = self.path / self.rows_name
        if self.packed.is_file():
            yield from _unpacked(self.packed)
            return
        if not file.is_file():
            return
        whole = _whole_lines(file)
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if lines.tell() > whole:
                    return
                where = f"{file} line {number}"
                yield where, _parse(line, where)

    @property
    def packed(self) -> Path:
        """The rows of a folder that is finished and put away; it is read, never added to."""
        return self.path / f"{self.rows_name}.gz"

    def done(self) -> dict[str, str | None]:
        """Ids that have a row, with their error if they failed."""
        file = self.path / self.rows_name
        if not file.is_file():
            return {}
        return {str(record["id"]): record.get("error") for _, record in self.records()}

    # --- writing ----------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Begin, or see that what was begun here has the same settings."""
        if self.packed.is_file():
            raise BadSetting(f"'{self.path}' is finished and packed; choose another --out.")
        self._clear()
        if (self.path / self.manifest_name).is_file():
            _compare(self.manifest()["settings"], settings, self.path)
            self._mend()
            return
        if self.path.exists() and any(item for item in self.path.iterdir() if item.name != ".lock"):
            raise BadSetting(f"'{self.path}' is not empty and not a {self.what}; choose another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / self.manifest_name, {"version": self.version, "settings": dict(settings), **about})

    def update(self, **values: Any) -> None:
        write_json(self.path / self.manifest_name, {**self.manifest(), **values})

    def append_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        with (self.path / self.rows_name).open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def drop_failed(self) -> int:
        """Forget rows with errors, so that they are tried again."""
        file = self.path / self.rows_name
        rows = [record for _, record in read_jsonl(file)] if file.is_file() else []
        kept = [record for record in rows if not record.get("error")]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        if len(kept) < len(rows):
            write_text(file, text)
        return len(rows) - len(kept)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time writes a folder."""
        if self.path.exists() and not self.path.is_dir():
            raise BadSetting(f"'{self.path}' is a file, not a folder for a {self.what}; choose another --out.")
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.path / ".lock", wait=False))
            except BlockingIOError:
                raise BadSetting(f"another process is writing to '{self.path}'; wait for it or stop it.") from None
            except OSError as error:
                raise disk_error(error, self.path) from error
            yield

    def _clear(self) -> None:
        """Take away what a process left half written that was killed; nobody else writes here now."""
        if self.path.is_dir():
            for left in self.path.glob(f".*{UNFINISHED}"):
                left.unlink()

    def _mend(self) -> None:
        """Cut off a line that was being written when the process died."""
        file = self.path / self.rows_name
        if file.is_file() and (whole := _whole_lines(file)) < file.stat().st_size:
            os.truncate(file, whole)


def _unpacked(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file} line {number}"
                yield where, _parse(line, where)
    except (OSError, EOFError) as error:
        raise ArtefactError(f"{file} cannot be unpacked ({error}); fetch it again.") from None


def _whole_lines(file: Path) -> int:
    """Bytes up to the last line break."""
    size = file.stat().st_size
    with file.open("rb") as content:
        end = size
        while end > 0:
            start = max(0, end - 65_536)
            content.seek(start)
            at = content.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ArtefactError(f"{where} is not valid JSON ({error}); the run is damaged.") from None
    if not isinstance(record, dict):
        raise ArtefactError(f"{where} is not a JSON object; the run is damaged.")
    return record


def _compare(started: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    differences = [
        f"{key} was {started.get(key)!r}, now {now.get(key)!r}"
        for key in sorted({*started, *now} - {"hash"})
        if started.get(key) != now.get(key)
    ]
    if differences:
        raise BadSetting(
            f"'{path}' was started with other settings: {'; '.join(differences)}. "
            "Use the same settings to go on, or another --out."
        )


def disk_error(error: OSError, path: Path) -> KnowgateError:
    """A full or broken disk as a sentence."""
    if error.errno is None:  # not the system's: a library uses the class for faults of its own
        raise error
    return KnowgateError(
        f"cannot write to '{path}': {error.strerror}. Finished rows are safe; mend it and run the same command again."
    )
