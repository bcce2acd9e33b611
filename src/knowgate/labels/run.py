"""A run folder: rows in `labels.jsonl`, hidden states in safetensors shards, everything else in `run.json`.

Safe against being killed at any moment: a shard is written whole before the rows that point to it, rows are appended
and flushed batch by batch, and a torn last line is cut off when the folder is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from knowgate.errors import ArtefactError, BadSetting, KnowgateError
from knowgate.files import read_json, read_jsonl, write_json
from knowgate.labels.rows import LabelRow, from_json, to_json
from knowgate.types import Vector

VERSION = 1
MANIFEST, ROWS = "run.json", "labels.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """Where a run is kept."""

    path: Path

    # --- reading ----------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        file = self.path / MANIFEST
        if not file.is_file():
            raise ArtefactError(f"'{self.path}' is not a label run: it has no {MANIFEST}. Make one: knowgate label")
        manifest = read_json(file)
        if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
            found = manifest.get("version") if isinstance(manifest, dict) else None
            raise ArtefactError(
                f"'{self.path}' was written by another version of knowgate (format {found}, this one reads {VERSION}). "
                "Label again into a new folder."
            )
        return manifest

    def rows(self) -> Iterator[LabelRow]:
        """The rows in file order; memory stays flat."""
        self.manifest()
        file = self.path / ROWS
        if not file.is_file():
            return
        whole = _whole_lines(file)
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if lines.tell() > whole:
                    return
                yield from_json(_parse(line, file, number), f"{file} line {number}")

    def vectors(self, rows: Sequence[LabelRow], name: str) -> Vector:
        """The named hidden states of these rows, one after another."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for place, row in enumerate(rows):
            if row.vector is None:
                raise ArtefactError(f"row '{row.id}' of '{self.path}' has no hidden states; label again with --layers.")
            wanted.setdefault(row.vector[0], []).append((row.vector[1], place))
        found: dict[int, Vector] = {}
        for shard, places in wanted.items():
            block = self._shard(shard, name)
            found.update({place: block[index] for index, place in places})
        return np.stack([found[place] for place in range(len(rows))]).astype(np.float32)

    def vector_names(self) -> list[str]:
        return sorted({name for file in self.path.glob("vectors-*.safetensors") for name in load_file(file)})

    def _shard(self, shard: str, name: str) -> Vector:
        try:
            tensors = load_file(self.path / shard)
        except Exception as error:  # noqa: BLE001 - safetensors raises its own kinds; all mean the file is bad
            raise ArtefactError(f"the shard {shard} of '{self.path}' cannot be read: {error}.") from None
        if name not in tensors:
            raise BadSetting(f"'{self.path}' has no hidden states '{name}'. It has: {', '.join(sorted(tensors))}.")
        return tensors[name]

    # --- writing ----------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Begin a run, or see that the one begun here has the same settings."""
        if (self.path / MANIFEST).is_file():
            _compare(self.manifest()["settings"], settings, self.path)
            self._mend()
            return
        if self.path.exists() and any(item for item in self.path.iterdir() if item.name != ".lock"):
            raise BadSetting(f"'{self.path}' is not empty and not a label run; choose another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / MANIFEST, {"version": VERSION, "settings": dict(settings), **about})

    def update(self, **values: Any) -> None:
        write_json(self.path / MANIFEST, {**self.manifest(), **values})

    def append(self, rows: Sequence[LabelRow], vectors: Mapping[str, Vector], first: int) -> None:
        """Add finished rows; `first` is the number of rows already there, which names the shard."""
        shard = f"vectors-{first:07d}.safetensors"
        if vectors:
            _write_whole(self.path / shard, save({key: np.ascontiguousarray(v) for key, v in vectors.items()}))
        lines = [json.dumps(to_json(row), ensure_ascii=False) + "\n" for row in rows]
        with (self.path / ROWS).open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> dict[str, str | None]:
        """Ids that have a row, with their error if they failed."""
        file = self.path / ROWS
        if not file.is_file():
            return {}
        return {str(record["id"]): record.get("error") for _, record in read_jsonl(file)}

    def drop_failed(self) -> int:
        """Forget rows with errors, so that they are tried again."""
        rows = [record for _, record in read_jsonl(self.path / ROWS)] if (self.path / ROWS).is_file() else []
        kept = [record for record in rows if not record.get("error")]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        if len(kept) < len(rows):
            _write_whole(self.path / ROWS, text.encode())
        return len(rows) - len(kept)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time writes a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadSetting(f"another process is writing to '{self.path}'; wait for it or stop it.") from None
            yield

    def _mend(self) -> None:
        """Cut off a line that was being written when the process died."""
        file = self.path / ROWS
        if file.is_file() and (whole := _whole_lines(file)) < file.stat().st_size:
            os.truncate(file, whole)


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


def _parse(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ArtefactError(f"{file} line {number} is not valid JSON ({error}); the run is damaged.") from None
    if not isinstance(record, dict):
        raise ArtefactError(f"{file} line {number} is not a JSON object; the run is damaged.")
    return record


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _compare(started: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    differences = [
        f"{key} was {started.get(key)!r}, now {now.get(key)!r}"
        for key in sorted({*started, *now})
        if started.get(key) != now.get(key)
    ]
    if differences:
        raise BadSetting(
            f"'{path}' was started with other settings: {'; '.join(differences)}. "
            "Use the same settings to go on, or another --out."
        )


def disk_error(error: OSError, path: Path) -> KnowgateError:
    """A full or broken disk as a sentence."""
    return KnowgateError(
        f"cannot write to '{path}': {error.strerror}. Finished rows are safe; mend it and run the same command again."
    )
