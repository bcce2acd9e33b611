"""A run folder: rows in `labels.jsonl`, hidden states in safetensors shards, everything else in `run.json`.

A shard is written whole before the rows that point to it, so a killed run has no row without its states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from knowgate.errors import ArtefactError, BadInput, BadSetting, KnowgateError
from knowgate.files import sha256_text
from knowgate.markup import escape
from knowgate.runs.inside import name_inside
from knowgate.runs.overview import run_line, run_sheet
from knowgate.runs.row_folder import RowFolder, disk_error
from knowgate.runs.rows import LabelRow, from_json, to_json
from knowgate.runs.states import read_shard, shards, state_names, states_digest, write_shard
from knowgate.typed import AtLeastZero
from knowgate.types import Vector

__all__ = ["MANIFEST", "ROWS", "VERSION", "RunFolder", "disk_error"]

VERSION = 1
MANIFEST, ROWS = "run.json", "labels.jsonl"
IDENTITY = ("model", "model_fingerprint", "prompts_fingerprint", "grader")


def settings_hash(settings: Mapping[str, Any]) -> str:
    """With a question's id, the key of its work: equal keys mean equal results."""
    return sha256_text(*(f"{key}={settings[key]!r}" for key in sorted(settings)))[:16]


@dataclass(frozen=True)
class RunSettings:
    """What is read back of a run's settings; there are more, for people."""

    model: str = ""
    model_fingerprint: str = ""
    prompts_fingerprint: str = ""
    grader: str = ""
    data: str = ""
    data_fingerprint: str = ""
    questions: AtLeastZero = 0
    retriever: str | None = None
    retriever_fingerprint: str | None = None
    samples: AtLeastZero | None = None
    max_tokens: AtLeastZero | None = None
    k: AtLeastZero | None = None
    reranker: str | None = None
    reranker_fingerprint: str | None = None
    candidates: AtLeastZero | None = None
    depth: AtLeastZero | None = None
    open_prompts: str | None = None
    seakr_layer: int | None = None
    synthetic: AtLeastZero = 0  # questions that an LLM wrote


@dataclass(frozen=True, repr=False)
class RunFolder(RowFolder):
    """Where a label run is kept."""

    version: ClassVar[int] = VERSION
    manifest_name: ClassVar[str] = MANIFEST
    rows_name: ClassVar[str] = ROWS
    what: ClassVar[str] = "label run"
    command: ClassVar[str] = "knowgate label"

    @property
    def instead(self) -> str:
        return name_inside(self.path, MANIFEST) or super().instead

    def settings(self) -> dict[str, Any]:
        """What made the run what it is; whoever compares models or wordings needs all of it.

        depth: how many hidden states the LLM has, where the run says so.
        """
        manifest = self.manifest()
        settings: dict[str, Any] = dict(manifest.get("settings", {}))
        self._check_whole(settings)
        settings |= {"depth": manifest["depth"]} if "depth" in manifest else {}
        missing = [key for key in IDENTITY if key not in settings]
        if missing:
            raise ArtefactError(
                f"{self.path / MANIFEST} lacks {', '.join(missing)}: it was changed or damaged. Label again."
            )
        self._read(RunSettings, settings, f"the settings in {MANIFEST}")
        return settings

    def _check_whole(self, settings: Mapping[str, Any]) -> None:
        """Settings come with their hash: another one means that rows were not made by what stands here."""
        rest = {key: value for key, value in settings.items() if key != "hash"}
        if "hash" in settings and settings["hash"] != settings_hash(rest):
            raise self.refusal(f"the settings in {MANIFEST} were changed or damaged")

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
            block = self._shard(shard, name, [(rows[number], place) for place, number in pairs])
            states.update({number: block[place] for place, number in pairs})
        if len({state.shape for state in states.values()}) > 1:
            raise self.refusal(f"the hidden states '{name}' are not of one width")
        return np.stack([states[number] for number in range(len(rows))]).astype(np.float32)

    def vector_names(self) -> list[str]:
        try:
            return sorted({name for path in shards(self.path) for name in state_names(self.file(path.name))})
        except BadInput as error:
            raise self.refusal(str(error)) from None

    def _shard(self, shard: str, name: str, rows: Sequence[tuple[LabelRow, int]]) -> Vector:
        """The named states of a shard, if they are still those of these rows (each with its place in it)."""
        try:
            states = read_shard(self.file(shard))
        except BadInput as error:
            raise self.refusal(str(error)) from None
        if name not in states:
            raise BadSetting(f"'{self.path}' has no hidden states '{name}'. It has: {', '.join(sorted(states))}.")
        for row, place in rows:
            if place >= len(states[name]):
                raise self.refusal(f"row '{row.id}' points to place {place} of {shard}, which has {len(states[name])}")
            if row.states and row.states != states_digest(row.id, states, place):
                raise self.refusal(f"the hidden states of row '{row.id}' in {shard} are not those it was written with")
        return states[name]

    def append(self, rows: Sequence[LabelRow], vectors: Mapping[str, Vector]) -> None:
        """Add finished rows; `vectors[name][i]` belongs to the i-th of them that did not fail."""
        placed = list(rows)
        if vectors:
            shard, numbers = write_shard(self.path, vectors), itertools.count()
            placed = [_placed(row, shard, next(numbers), vectors) if row.error is None else row for row in rows]
        self.append_records([to_json(row) for row in placed])

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


def _placed(row: LabelRow, shard: str, place: int, vectors: Mapping[str, Vector]) -> LabelRow:
    return replace(row, vector=(shard, place), states=states_digest(row.id, vectors, place))
