"""Goes through the rows of label runs once: keeps those that can be used, in memory or, where they are many, where each
lies on disk, with a column for everything that is counted of them later.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.runs.columns import COLUMNS, Columns, fill
from knowgate.runs.readings import bare_reading, recorded, recorded_layers
from knowgate.runs.rows import LabelRow, from_json
from knowgate.runs.run_folder import RunFolder
from knowgate.runs.stored import PackedTexts, StoredReadings, StoredRows
from knowgate.types import Reading

PART = 5_000  # rows that are in memory at once where all of them are too many
ON_DEMAND = ("loose_keys",)  # columns that few ask for


@dataclass
class Gathered:
    """What was found so far. graded: only rows with a verdict. held: from how many rows on they are left on disk."""

    names: Sequence[str]
    graded: bool
    held: int | None
    left_out: dict[str, int] = field(default_factory=lambda: {"failed": 0, "not graded": 0})
    _rows: list[LabelRow] = field(default_factory=list)  # all of them, or those not yet in columns
    _run: array[int] = field(default_factory=lambda: array("i"))
    _places: array[int] = field(default_factory=lambda: array("q"))
    _parts: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    _keys: list[PackedTexts] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._run)

    @property
    def seen(self) -> int:
        """Rows that were looked at."""
        return len(self) + sum(self.left_out.values())

    @property
    def _on_disk(self) -> bool:
        return self.held is not None and len(self) > self.held

    def add(self, run: int, folder: RunFolder) -> None:
        """The rows with an answer and, if asked, a verdict; the others are counted."""
        for where, record, place in folder.placed_records():
            row = from_json(record, where)
            if row.error is not None:
                self.left_out["failed"] += 1
            elif row.closed is None or (self.graded and row.closed.correct is None):
                self.left_out["not graded"] += 1
            else:
                self._keep(row, run, place)

    def _keep(self, row: LabelRow, run: int, place: int) -> None:
        self._rows.append(row)
        self._run.append(run)
        self._places.append(place)
        if self._on_disk and len(self._rows) >= PART:
            self._let_go()

    def _let_go(self) -> None:
        """The rows in memory become columns."""
        while self._rows:
            some, self._rows = self._rows[:PART], self._rows[PART:]
            first = sum(map(len, self._keys))
            keys = [f"{self.names[self._run[first + place]]}/{row.id}" for place, row in enumerate(some)]
            seen = Columns(some, keys, [bare_reading(row) for row in some])
            self._parts.append({name: getattr(seen, name) for name in COLUMNS if name not in ON_DEMAND})
            self._keys.append(PackedTexts.of(keys))

    def columns(self, folders: Sequence[RunFolder], layers: Sequence[int] | None) -> Columns:
        """Everything that was kept. layers: those whose hidden states are read; None for all that there are."""
        run = np.array(self._run, dtype=np.int32)
        filled = sorted(set(self._run))  # a run of failed or ungraded rows has no states to look for
        read = {one: recorded_layers(folders[one]) if layers is None else list(layers) for one in filled}
        if not self._on_disk:
            return self._in_memory(folders, run, read)
        self._let_go()
        rows = StoredRows(folders, run, np.array(self._places, dtype=np.int64))
        readings = StoredReadings(rows, [read.get(one, []) for one in range(len(folders))])
        known = {name: np.concatenate([part.pop(name) for part in self._parts]) for name in list(self._parts[0])}
        return fill(Columns(rows, PackedTexts.joined(self._keys), readings), known)

    def _in_memory(self, folders: Sequence[RunFolder], run: NDArray[np.int32], layers: dict[int, list[int]]) -> Columns:
        readings = list[Reading]()
        for one in layers:
            readings += recorded(folders[one], [self._rows[place] for place in np.flatnonzero(run == one)], layers[one])
        keys = [f"{self.names[one]}/{row.id}" for one, row in zip(self._run, self._rows, strict=True)]
        return Columns(self._rows, keys, readings)
