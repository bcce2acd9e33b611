"""A run folder: rows in `labels.jsonl`, hidden states in safetensors shards, everything else in `run.json`.

A shard is written whole before the rows that point to it, so a killed run has no row without its states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file, save

from knowgate.errors import ArtefactError, BadSetting, KnowgateError
from knowgate.files import write_bytes
from knowgate.markup import escape
from knowgate.runs.overview import run_line, run_sheet
from knowgate.runs.row_folder import RowFolder, disk_error
from knowgate.runs.rows import LabelRow, from_json, to_json
from knowgate.types import Vector

__all__ = ["MANIFEST", "ROWS", "VERSION", "RunFolder", "disk_error"]

VERSION = 1
MANIFEST, ROWS = "run.json", "labels.jsonl"
IDENTITY = ("model", "model_fingerprint", "prompts_fingerprint", "grader")


@dataclass(frozen=True, repr=False)
class RunFolder(RowFolder):
    """Where a label run is kept."""

    version: ClassVar[int] = VERSION
    manifest_name: ClassVar[str] = MANIFEST
    rows_name: ClassVar[str] = ROWS
    what: ClassVar[str] = "label run"
    command: ClassVar[str] = "knowgate label"

    def settings(self) -> dict[str, Any]:
        """What made the run what it is; whoever compares models or wordings needs all of it.

        depth: how many hidden states the LLM has, where the run says so.
        """
        manifest = self.manifest()
        stored, depth = manifest.get("settings"), manifest.get("depth")
        settings: dict[str, Any] = dict(stored) if isinstance(stored, dict) else {}
        settings |= {"depth": depth} if isinstance(depth, int) else {}
        missing = [key for key in IDENTITY if key not in settings]
        if missing:
            raise ArtefactError(
                f"{self.path / MANIFEST} lacks {', '.join(missing)}: it was changed or damaged. Label again."
            )
        return settings

    def rows(self) -> Iterator[LabelRow]:
        """The rows in file order; memory stays flat."""
        for where, record in self.records():
            yield from_json(record, where)

    def vectors(self, rows: Sequence[LabelRow], name: str) -> Vector:
        """The named hidden states of these rows, one after another."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for number, row in enumerate(rows):
            if row.vector is None:
                raise ArtefactError(f"row '{row.id}' of '{self.path}' has no hidden states; label again with --layers.")
            wanted.setdefault(row.vector[0], []).append((row.vector[1], number))
        states: dict[int, Vector] = {}
        for shard, pairs in wanted.items():
            block = self._shard(shard, name)
            states.update({number: block[index] for index, number in pairs})
        return np.stack([states[number] for number in range(len(rows))]).astype(np.float32)

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

    def append(self, rows: Sequence[LabelRow], vectors: Mapping[str, Vector]) -> None:
        """Add finished rows; `vectors[name][i]` belongs to the i-th of them that did not fail."""
        placed = list(rows)
        if vectors:
            shard = self._new_shard()
            write_bytes(self.path / shard, save({key: np.ascontiguousarray(v) for key, v in vectors.items()}))
            numbers = itertools.count()
            placed = [replace(row, vector=(shard, next(numbers))) if row.error is None else row for row in rows]
        self.append_records([to_json(row) for row in placed])

    def _new_shard(self) -> str:
        """A name that no shard has had: one that is overwritten would give its rows other questions' states."""
        taken = [int(file.stem.removeprefix("vectors-")) for file in self.path.glob("vectors-*.safetensors")]
        return f"vectors-{max(taken, default=-1) + 1:07d}.safetensors"

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}: {self._about}>"

    def _repr_html_(self) -> str:
        """For notebooks. Reads all rows."""
        try:
            return run_sheet(self.path.name, self.manifest(), self.rows()).html()
        except KnowgateError:
            return f"<p>{escape(repr(self))}</p>"

    @property
    def _about(self) -> str:
        """In a line; whoever prints a folder wants no error."""
        if not (self.path / MANIFEST).is_file():
            return "not begun"
        try:
            return run_line(self.manifest())
        except KnowgateError as error:
            return str(error)
