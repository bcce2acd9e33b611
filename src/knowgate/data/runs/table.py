"""Goes through the rows of label runs once: keeps those that can be used, in memory or, where they are many, where each
lies on disk, with a column for everything that is counted of them later.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import sha256_text
from knowgate.data.runs.caveats import warn_if_mixed
from knowgate.data.runs.columns import COLUMN_NAMES, LabelColumns, fill_columns
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedNeeds, load_aligned_needs, load_shared_needs, select_needs
from knowgate.data.runs.rows import ANSWER_FREQUENCY, LabelRow, assign_frequency_thirds, row_from_json
from knowgate.data.runs.storage import (
    PackedTexts,
    StoredReadings,
    StoredRows,
    build_draft_reading,
    list_recorded_layers,
    load_readings,
)
from knowgate.errors import BadInput, BadSetting
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.types import Reading

CHUNK_ROWS = 5_000  # rows that are in memory at once where all of them are too many
LAZY_COLUMNS = ("loose_keys",)  # columns that few ask for


@dataclass
class LabelTableBuilder:
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
            row = row_from_json(record, where)
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
        if self._on_disk and len(self._rows) >= CHUNK_ROWS:
            self._let_go()

    def _let_go(self) -> None:
        """The rows in memory become columns."""
        while self._rows:
            some, self._rows = self._rows[:CHUNK_ROWS], self._rows[CHUNK_ROWS:]
            first = sum(map(len, self._keys))
            keys = [f"{self.names[self._run[first + place]]}/{row.id}" for place, row in enumerate(some)]
            seen = LabelColumns(some, keys, [build_draft_reading(row) for row in some])
            self._parts.append({name: getattr(seen, name) for name in COLUMN_NAMES if name not in LAZY_COLUMNS})
            self._keys.append(PackedTexts.of(keys))

    def columns(self, folders: Sequence[RunFolder], layers: Sequence[int] | None) -> LabelColumns:
        """Everything that was kept. layers: those whose hidden states are read; None for all that there are."""
        run = np.array(self._run, dtype=np.int32)
        filled = sorted(set(self._run))  # a run of failed or ungraded rows has no states to look for
        read = {one: list_recorded_layers(folders[one]) if layers is None else list(layers) for one in filled}
        if not self._on_disk:
            return self._in_memory(folders, run, read)
        self._let_go()
        rows = StoredRows(folders, run, np.array(self._places, dtype=np.int64))
        readings = StoredReadings(rows, [read.get(one, []) for one in range(len(folders))])
        known = {name: np.concatenate([part.pop(name) for part in self._parts]) for name in list(self._parts[0])}
        return fill_columns(LabelColumns(rows, PackedTexts.joined(self._keys), readings), known)

    def _in_memory(
        self, folders: Sequence[RunFolder], run: NDArray[np.int32], layers: dict[int, list[int]]
    ) -> LabelColumns:
        readings = list[Reading]()
        for one in layers:
            readings += load_readings(
                folders[one], [self._rows[place] for place in np.flatnonzero(run == one)], layers[one]
            )
        keys = [f"{self.names[one]}/{row.id}" for one, row in zip(self._run, self._rows, strict=True)]
        return LabelColumns(self._rows, keys, readings)


MISMATCHES = {
    "model_fingerprint": "are of different models",
    "prompts_fingerprint": "are of different prompts",
    "retriever_fingerprint": "are of different retrievers",
    "reranker_fingerprint": "have passages that were chosen by different rerankers",
    "max_tokens": "drafted answers of different length",
}


def check_compatible(runs: Sequence[Path], settings: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    """advice: the settings that must be the same, each with what to do where it is not."""
    check_unique_runs(runs)
    for key, way_out in advice.items():
        values = [str(one.get(key)) for one in settings]
        if len(set(values)) > 1:
            listed = "; ".join(f"{run}: {value}" for run, value in zip(runs, values, strict=True))
            raise BadSetting(f"the label runs {MISMATCHES[key]} ({listed}); {way_out}.")


def check_unique_runs(runs: Sequence[Path]) -> None:
    whole = [run.resolve() for run in runs]
    twice = [run for number, run in enumerate(runs) if whole[number] in whole[:number]]
    if twice:
        raise BadSetting(f"the label run '{twice[0]}' is named twice. Name it once.")


def name_runs(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's where that tells them apart, else its whole path."""
    folders = [run.resolve() for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


log = logging.getLogger(__name__)
DEFAULT_ROUNDS = 3.0
MAX_ROWS_IN_MEMORY = 20_000  # rows in memory, some 0.5 GB; an evaluation leaves more of them on disk
ONE_MODEL = "evaluate one model at a time"
EVALUATION_ADVICE = {
    "model_fingerprint": ONE_MODEL,
    "prompts_fingerprint": ONE_MODEL,
    "reranker_fingerprint": "evaluate them one at a time, or side by side: knowgate sweep beta",
}


@dataclass(frozen=True)
class LabelTable(LabelColumns):
    """Graded questions of one model under one wording.

    keys: a name for each row over all runs. settings: what the runs share. recorded: needs on record, by gate.
    left_out: how many rows are not used, by reason.
    """

    settings: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    recorded: Mapping[str, RecordedNeeds] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def is_held(self) -> bool:
        """Whether the rows are in memory; else they are read anew whenever somebody looks at them (see `stored`)."""
        return not isinstance(self.rows, StoredRows)

    @property
    def open_right(self) -> BoolArray | None:
        """Whether the answer with passages is right; None where no row has one.

        Where nothing was found, the pipeline answers closed-book.
        """
        return self.final_right if self.opened.any() else None

    @property
    def always_right(self) -> BoolArray:
        """What always retrieving comes to: without any open-book answer, the closed-book ones."""
        return self.closed_right if self.open_right is None else self.open_right

    @property
    def iterative_right(self) -> BoolArray | None:
        """Whether the answer after several rounds of retrieval is right; None where not every opened row has one."""
        if not self.opened.any() or (self.opened & ~self.iterated).any():
            return None
        return self.iterated_right

    @property
    def rounds(self) -> float:
        """Rounds of retrieval an iterative answer took, on average; 3 where that is not on record."""
        counted = self.rounds_taken[self.rounds_taken > 0]
        return float(np.mean(counted)) if len(counted) else DEFAULT_ROUNDS

    @property
    def unopened(self) -> int:
        """Rows whose retrieval found nothing, among others: they are answered closed-book either way."""
        return 0 if self.open_right is None else int((~self.opened).sum())

    def open_tokens(self) -> FloatArray:
        return self.open_lengths

    def closed_tokens(self) -> FloatArray:
        return self.closed_lengths

    def part_of(self, dimension: str) -> NDArray[np.object_]:
        """The part each row belongs to along a dimension, by name; None where its data set does not say."""
        if dimension == ANSWER_FREQUENCY:
            known = [None if count < 0 else count for count in self.frequencies.tolist()]
            return np.array(assign_frequency_thirds(known), dtype=object)
        names = {kind: dict(kind).get(dimension) for kind in set(self.kinds.tolist())}
        return np.array([names[kind] for kind in self.kinds.tolist()], dtype=object)

    # --- some of them ----------------------------------------------------------------------------

    def subset(self, numbers: Iterable[int]) -> LabelTable:
        """The rows of these numbers, in their order."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        known = {name: column[chosen] for name, column in self.known.items()}
        return fill_columns(replace(self, **self._some(chosen)), known)

    @property
    def has_lengths(self) -> bool:
        """Whether the rows tell how long answers were; grades without texts do not."""
        return bool(self.closed_tokens().any() or self.open_tokens().any())

    def _some(self, chosen: NDArray[np.int64]) -> dict[str, Any]:
        if not isinstance(self.rows, StoredRows):
            return {name: [getattr(self, name)[number] for number in chosen] for name in ("rows", "keys", "readings")}
        if len(chosen) > MAX_ROWS_IN_MEMORY:
            some = {name: getattr(self, name).some(chosen) for name in ("rows", "keys", "readings")}
            recorded = {gate: select_needs(item, chosen, some["keys"]) for gate, item in self.recorded.items()}
            return {**some, "recorded": recorded}
        rows = list(self.rows.taken(chosen))
        assert isinstance(self.keys, PackedTexts)
        assert isinstance(self.readings, StoredReadings)
        return {"rows": rows, "keys": list(self.keys.taken(chosen)), "readings": self.readings.of(chosen, rows)}

    def parts(self) -> Iterator[LabelTable]:
        """The trial in pieces whose rows are in memory: itself where they are."""
        if self.is_held:
            yield self
            return
        for start in range(0, len(self.rows), CHUNK_ROWS):
            yield self.subset(range(start, min(start + CHUNK_ROWS, len(self.rows))))

    def but(self, **changes: Any) -> LabelTable:
        """The same rows, with something else about them."""
        return fill_columns(replace(self, **changes), self.known)


def load_label_table(
    runs: Sequence[Path],
    *,
    layers: Sequence[int] | None = None,
    same: Mapping[str, str] = EVALUATION_ADVICE,
    graded: bool = True,
    held: int | None = None,
) -> LabelTable:
    """All graded rows of these runs; with graded=False all that are answered.

    layers: those whose hidden states are read; None for all that were kept. same: the settings that the runs must
    share, with what to do where they do not. held: leave rows on disk where there are more than this (see `stored`).
    """
    if not runs:
        raise BadInput("there is no label run to read: name at least one.")
    settings = [RunFolder(run).settings() for run in runs]
    check_compatible(runs, settings, same)
    names = name_runs(runs)
    gathered = LabelTableBuilder(names, graded, held)
    for number, run in enumerate(runs):
        before = gathered.seen
        gathered.add(number, RunFolder(run))
        warn_if_unfinished(run, gathered.seen - before, RunFolder(run).settings().get("questions"))
    if not len(gathered):
        lost = ", ".join(f"{count} {reason}" for reason, count in gathered.left_out.items() if count) or "no row at all"
        raise BadInput(
            f"there is no graded row in {', '.join(map(str, runs))}: {lost}. Label questions that have gold answers; "
            f"what is there is shown by: knowgate report {runs[0]}"
        )
    found = gathered.columns([RunFolder(run) for run in runs], layers)
    warn_if_mixed(int(found.synthetic.sum()), len(found.rows))
    if isinstance(found.rows, StoredRows):
        needs = load_aligned_needs(runs, names, found.keys, found.rows.run)
    else:
        needs = load_shared_needs(runs, names)
    about = (_shared(settings), [str(run) for run in runs], needs, gathered.left_out)
    return fill_columns(LabelTable(found.rows, found.keys, found.readings, *about), found.known)


def warn_if_unfinished(run: Path, n_rows: int, wanted: object) -> None:
    """Say so where a run has rows for some of its questions only: its figures are those of a part."""
    if isinstance(wanted, int) and n_rows < wanted:
        words = "%s holds %d of %d questions: it was not finished. The same `knowgate label` goes on with it."
        log.warning(words, run, n_rows, wanted)


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settings of all runs; the data are those of every run, so they have a fingerprint of their own."""
    data = sha256_text(*(str(one.get("data_fingerprint")) for one in settings))[:16]
    return {**settings[0], "data_fingerprint": data}
