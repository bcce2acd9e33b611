"""Folders that hold a manifest and a JSON Lines file with one row per question, written batch by batch.

The writing process may be killed at any moment. Rows are flushed to disk after each batch, and an incomplete last line
is removed when writing continues.
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
from typing import Any, ClassVar, TypeVar

from knowgate.core import files
from knowgate.core.artifacts import links_outside, resolve_inside
from knowgate.core.schema import read_record
from knowgate.core.validation import parse_json, read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError

Record = TypeVar("Record")


@dataclass(frozen=True)
class FolderManifest:
    """Fields that all manifests share. A manifest is a JSON file about the rows of a folder.

    Attributes:
        settings: Settings that the rows were made with.
        totals: Totals over all rows, such as the number of failed questions.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RowHeader:
    """Fields that all rows share.

    Attributes:
        id: Id of the question.
        error: Why the question failed; None if it did not fail.
    """

    id: str
    error: str | None = None


@dataclass(frozen=True)
class RowFolder:
    """A folder with a manifest and a file of rows. Subclasses name the files.

    Attributes:
        path: The folder.
        version: Format version that is written and read.
        manifest_name: File name of the manifest.
        rows_name: File name of the rows.
        folder_type: What messages call the folder, such as "label run".
        command: Command that creates such a folder.
    """

    path: Path

    version: ClassVar[int]
    manifest_name: ClassVar[str]
    rows_name: ClassVar[str]
    folder_type: ClassVar[str]
    command: ClassVar[str]

    # --- reading ----------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """Read the manifest.

        Raises:
            ArtifactError: The folder has no manifest, or one of another version.
        """
        file = self.file(self.manifest_name)
        if not file.is_file():
            raise ArtifactError(
                f"'{self.path}' is not a {self.folder_type}: it has no {self.manifest_name}. Make one: {self.command}"
            )
        manifest = read_json(file)
        version = manifest.get("version") if isinstance(manifest, dict) else None
        if version != self.version:
            raise ArtifactError(
                f"'{self.path}' was written by another version of knowgate. It has format {str(version)[:40]}, but this "
                f"version reads format {self.version}. Create a new folder: {self.command}"
            )
        self._validate(FolderManifest, manifest, str(file))
        return dict(manifest)

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder. Names and links that lead outside are rejected."""
        path = resolve_inside(self.path, name, self.make_error)
        if links_outside(path, self.path):
            raise self.make_error(f"'{name}' is a link that leads out of the folder")
        return path

    def make_error(self, problem: str) -> ArtifactError:
        """Make the error for an unusable folder. `problem` is the reason."""
        return ArtifactError(
            f"the {self.folder_type} '{self.path}' cannot be used: {problem.rstrip('.')}. Make a new one: {self.command}"
        )

    def _validate(self, kind: type[Record], value: Any, where: str) -> Record:
        """Convert a JSON value to a dataclass, ignoring unknown fields."""
        try:
            return read_record(kind, value, where, ignore_unknown=True)
        except BadInput as error:
            raise self.make_error(str(error)) from None

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, JSON object) for each row, in file order. The location is for error messages."""
        for where, record, _ in self.records_with_offsets():
            yield where, record

    def records_with_offsets(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Yield (location, JSON object, byte offset) for each row.

        A killed process can leave an incomplete last line, which is skipped. A packed folder was finished before it was
        compressed, so its last line is complete even without a newline.
        """
        self.manifest()  # raises ArtifactError if the folder cannot be used
        if not self.is_packed and not self.file(self.rows_name).is_file():
            return
        offset = 0
        with self._open_rows() as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n") or self.is_packed:
                    where = f"{lines.name} line {number}"
                    yield where, self._parse_row(line, where), offset
                offset += len(line)

    def records_at(self, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of the rows at these byte offsets. Ascending offsets are read fastest."""
        with self._open_rows() as lines:
            for offset in offsets:
                lines.seek(offset)
                yield self._parse_row(lines.readline(), f"{lines.name} at byte {offset}")

    @property
    def is_packed(self) -> bool:
        """Whether the folder is finished and has its rows in a compressed file, which is never extended."""
        return self.file(f"{self.rows_name}.gz").is_file()

    @contextlib.contextmanager
    def _open_rows(self) -> Iterator[Any]:
        """Open the file of rows, compressed or not, in binary mode."""
        if not self.is_packed:
            with self.file(self.rows_name).open("rb") as lines:
                yield lines
            return
        file = self.file(f"{self.rows_name}.gz")
        try:
            with gzip.open(file, "rb") as lines:
                yield lines
        except (OSError, EOFError, zlib.error) as error:
            raise ArtifactError(f"the file {file} cannot be decompressed ({error}). Download it again.") from None

    def _parse_row(self, line: bytes, where: str) -> dict[str, Any]:
        """Parse a line of the file of rows as a JSON object."""
        try:
            record = parse_json(line.decode(), where)
        except (UnicodeDecodeError, BadInput) as error:
            raise self.make_error(f"{where} is damaged: {error}") from None
        if not isinstance(record, dict):
            raise self.make_error(f"{where} is not a JSON object")
        return record

    def done(self) -> dict[str, str | None]:
        """Return the questions that have a row: the error of each row, by question id. None means no error."""
        if not (self.path / self.manifest_name).is_file():
            return {}
        headers = [self._validate(RowHeader, record, where) for where, record in self.records()]
        return {header.id: header.error for header in headers}

    # --- writing ----------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Create the folder, or continue one with the same settings.

        Args:
            settings: Settings that identify the rows.
            about: Further entries of the manifest.

        Raises:
            BadSetting: The folder holds other files, is packed, or was started with other settings.
        """
        self._check_path()
        if self.is_packed:
            raise BadSetting(f"'{self.path}' is complete, so no rows can be added. Choose another `out`.")
        self.path.mkdir(parents=True, exist_ok=True)
        for file in self.path.glob(f".*{files.PARTIAL_SUFFIX}"):  # a killed process left them half written
            file.unlink()
        if (self.path / self.manifest_name).is_file():
            _check_same_settings(self.manifest().get("settings", {}), settings, self.path)
            self._drop_partial_row()
        else:
            manifest = {"version": self.version, "settings": dict(settings), **about}
            files.write_json(self.path / self.manifest_name, manifest)

    def _drop_partial_row(self) -> None:
        """Remove the last row if a killed process left it incomplete."""
        rows_file = self.path / self.rows_name
        if rows_file.is_file():
            os.truncate(rows_file, files.find_last_line_end(rows_file))

    def update(self, **values: Any) -> None:
        """Replace entries of the manifest, and keep the others."""
        files.write_json(self.path / self.manifest_name, {**self.manifest(), **values})

    def append_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append rows and flush them to disk."""
        with (self.path / self.rows_name).open("ab") as file:
            file.write(_format_lines(records).encode())
            file.flush()
            os.fsync(file.fileno())

    def drop_failed(self) -> int:
        """Remove the rows with an error, to try their questions again. The folder must be locked (see `exclusive`).

        Returns:
            The number of rows that have an error. A packed folder is not changed.
        """
        records = [record for _, record in self.records()]
        good = [record for record in records if not record.get("error")]
        if len(good) < len(records) and not self.is_packed:
            files.write_text(self.path / self.rows_name, _format_lines(good))
        return len(records) - len(good)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the folder for writing inside a `with` block.

        Raises:
            BadSetting: Another process has locked the folder.
            KnowgateError: The disk is full, or the block cannot write for another reason.
        """
        self._check_path()
        try:
            with files.file_lock(self.path / ".lock", wait=False):
                yield
        except BlockingIOError:
            raise BadSetting(
                f"another process is writing to '{self.path}'. Wait until it has finished, or stop it."
            ) from None
        except OSError as error:
            if error.errno is None:  # it comes from a library, not from the file system
                raise
            raise KnowgateError(
                f"cannot write to '{self.path}': {error.strerror}. Finished rows are saved. Fix the problem and run the "
                "same command again."
            ) from error

    def _check_path(self) -> None:
        """Raise BadSetting if the path is a file, or a folder with other content."""
        try:
            files.check_output_folder(self.path, [self.manifest_name], f"a {self.folder_type}")
        except ArtifactError as error:
            raise BadSetting(str(error)) from None


def _format_lines(records: Sequence[Mapping[str, Any]]) -> str:
    """Format records as JSON Lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _check_same_settings(started: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Raise BadSetting if a folder was started with other settings. The message lists the differences."""
    names = {*started, *current} - {"hash"}  # the hash depends on the other settings
    differences = [
        f"{name} was {started.get(name)!r}, now {current.get(name)!r}"
        for name in sorted(names)
        if started.get(name) != current.get(name)
    ]
    if differences:
        raise BadSetting(
            f"'{path}' was started with other settings: {'; '.join(differences)}. Use the same settings to continue it, or "
            "choose another `out`."
        )
