"""A folder of rows that grows batch by batch: a manifest, and one JSON line for each question.

Safe against being killed at any moment: rows are appended and flushed batch by batch, and a torn last line is cut off
when the folder is opened again. Knows nothing of what the rows say beyond their `id` and `error`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from knowgate.core.artifacts import links_outside, resolve_inside
from knowgate.core.files import (
    PARTIAL_SUFFIX,
    check_output_folder,
    file_lock,
    find_last_line_end,
    write_json,
    write_text,
)
from knowgate.core.schema import read_record
from knowgate.core.validation import parse_json, read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError


@dataclass(frozen=True)
class FolderManifest:
    """What every manifest has: how the rows were made, and counts of them."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RowHeader:
    """What every row has."""

    id: str
    error: str | None = None


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
        file = self.file(self.manifest_name)
        if not file.is_file():
            raise ArtifactError(f"'{self.path}' is not a {self.what}: it has no {self.manifest_name}. {self.instead}")
        manifest = read_json(file)
        if not isinstance(manifest, dict) or manifest.get("version") != self.version:
            written = manifest.get("version") if isinstance(manifest, dict) else None
            raise ArtifactError(
                f"'{self.path}' was written by another version of knowgate (format {str(written)[:40]}, this one reads "
                f"{self.version}). Make a new folder: {self.command}"
            )
        self._read(FolderManifest, manifest, str(file))
        return manifest

    @property
    def instead(self) -> str:
        """What to do where this is no such folder."""
        return f"Make one: {self.command}"

    def file(self, name: str) -> Path:
        """A file of this folder; one that lies elsewhere, by its name or as a link, is refused."""
        path = resolve_inside(self.path, name, self.refusal)
        if links_outside(path, self.path):
            raise self.refusal(f"'{name}' is a link that leads out of the folder")
        return path

    def refusal(self, problem: str) -> ArtifactError:
        return ArtifactError(
            f"the {self.what} '{self.path}' cannot be used: {problem.rstrip('.')}. Make a new one: {self.command}"
        )

    def _read(self, kind: type[Any], value: Any, where: str) -> Any:
        try:
            return read_record(kind, value, where, ignore_unknown=True)
        except BadInput as error:
            raise self.refusal(str(error)) from None

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row's record in file order, with where it stands; memory stays flat."""
        for where, record, _ in self.records_with_offsets():
            yield where, record

    def records_with_offsets(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """The same, each with its place: the byte of the rows, unpacked, at which its line begins."""
        self.manifest()
        place = 0
        for where, line in self._lines():
            yield where, self._row(line, where), place
            place += len(line)

    def records_at(self, places: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The records whose lines begin at these places; quickest in rising order."""
        with _opened(self.packed) if self.packed.is_file() else self.file(self.rows_name).open("rb") as lines:
            for place in places:
                lines.seek(place)
                where = f"{lines.name} at byte {place}"
                yield self._row(lines.readline(), where)

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        file = self.file(self.rows_name)
        if self.packed.is_file():
            yield from _unpacked(self.packed)
        elif file.is_file():
            left = find_last_line_end(file)
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    left -= len(line)
                    if left < 0:
                        return
                    yield f"{file} line {number}", line

    def _row(self, line: bytes, where: str) -> dict[str, Any]:
        record = _parse(line, where)
        self._read(RowHeader, record, where)
        return record

    @property
    def packed(self) -> Path:
        """The rows of a folder that is finished and put away; it is read, never added to."""
        return self.file(f"{self.rows_name}.gz")

    def done(self) -> dict[str, str | None]:
        """Ids that have a row, with their error if they failed."""
        if not (self.path / self.manifest_name).is_file():
            return {}
        return {record["id"]: record.get("error") for _, record in self.records()}

    # --- writing ----------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Begin, or see that what was begun here has the same settings."""
        self._check_place()
        if self.packed.is_file():
            raise BadSetting(f"'{self.path}' is finished and packed; choose another --out.")
        self._clear()
        if (self.path / self.manifest_name).is_file():
            _compare(self.manifest().get("settings", {}), settings, self.path)
            self._mend()
            return
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
        """Forget rows with errors, so that they are tried again. For whoever writes here alone (`exclusive`)."""
        rows = [record for _, record in self.records()]
        kept = [record for record in rows if not record.get("error")]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        if len(kept) < len(rows) and not self.packed.is_file():
            write_text(self.path / self.rows_name, text)
        return len(rows) - len(kept)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time writes a folder."""
        self._check_place()
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(file_lock(self.path / ".lock", wait=False))
            except BlockingIOError:
                raise BadSetting(f"another process is writing to '{self.path}'; wait for it or stop it.") from None
            except OSError as error:
                raise explain_disk_error(error, self.path) from error
            yield

    def _clear(self) -> None:
        """Take away what a process left half written that was killed; nobody else writes here now."""
        if self.path.is_dir():
            for left in self.path.glob(f".*{PARTIAL_SUFFIX}"):
                left.unlink()

    def _check_place(self) -> None:
        """Refuse to begin in a folder of other things, or where a file is."""
        try:
            check_output_folder(self.path, [self.manifest_name], f"a {self.what}")
        except ArtifactError as error:
            raise BadSetting(str(error)) from None

    def _mend(self) -> None:
        """Cut off a line that was being written when the process died."""
        file = self.path / self.rows_name
        if file.is_file() and (whole := find_last_line_end(file)) < file.stat().st_size:
            os.truncate(file, whole)


def _unpacked(file: Path) -> Iterator[tuple[str, bytes]]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            yield f"{file} line {number}", line


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[gzip.GzipFile]:
    """A packed file; what goes wrong while it is read is said."""
    try:
        with gzip.open(file, "rb") as lines:
            yield lines
    except (OSError, EOFError, zlib.error) as error:
        raise ArtifactError(f"{file} cannot be unpacked ({error}); fetch it again.") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line.decode(), where)
    except UnicodeDecodeError:
        raise ArtifactError(f"{where} is not UTF-8 text; the run is damaged. Make it again.") from None
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}; the run is damaged. Make it again.") from None
    if not isinstance(record, dict):
        raise ArtifactError(f"{where} is not a JSON object; the run is damaged. Make it again.")
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


def explain_disk_error(error: OSError, path: Path) -> KnowgateError:
    """A full or broken disk as a sentence."""
    if error.errno is None:  # not the system's: a library uses the class for faults of its own
        raise error
    return KnowgateError(
        f"cannot write to '{path}': {error.strerror}. Finished rows are safe; mend it and run the same command again."
    )
