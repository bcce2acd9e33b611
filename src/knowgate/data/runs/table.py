"""The label table: graded questions of one model, read once from label runs.

Everything that evaluates, trains or calibrates takes a `LabelTable`. Reports that also show failed rows read
`RunFolder.rows` instead.
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

from knowgate.core import split_batches
from knowgate.core.files import sha256_text
from knowgate.data.runs import storage
from knowgate.data.runs.columns import COLUMN_NAMES, LabelColumns, fill_columns, warn_if_mixed
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import OWN_VERDICT, TableScores, check_compatible, load_scores, warn_if_unfinished
from knowgate.data.runs.rows import (
    ANSWER_FREQUENCY,
    LabelRow,
    assign_frequency_thirds,
    list_graders,
    row_from_json,
    select_grader,
)
from knowgate.errors import BadInput
from knowgate.stats.metrics import BoolArray
from knowgate.types import Reading

log = logging.getLogger(__name__)
CHUNK_ROWS = 5_000  # rows in memory at once when all of them are too many
MAX_ROWS_IN_MEMORY = 20_000  # about 0.5 GB; an evaluation of more rows leaves them on disk
DEFAULT_ROUNDS = 3.0  # assumed number of retrieval rounds if it was not recorded
LAZY_COLUMNS = ("loose_fingerprints",)  # rarely used, so not computed while rows are read
ONE_MODEL_ADVICE = "Evaluate one model at a time"
EVALUATION_ADVICE = {
    "model_fingerprint": ONE_MODEL_ADVICE,
    "prompts_fingerprint": ONE_MODEL_ADVICE,
    "reranker_fingerprint": "Evaluate them one at a time, or side by side: knowgate sweep beta",
}


@dataclass(frozen=True)
class RunRows:
    """The rows of a label table from one run."""

    path: Path  # folder of the run
    numbers: storage.RowNumbers = field(repr=False)  # indices of the rows in the table


@dataclass(frozen=True)
class LabelTable(LabelColumns):
    """Graded questions of one model, answered closed-book (without passages) and perhaps open-book (with passages).

    Attributes:
        settings: Settings that all runs share.
        runs: Paths of the label runs.
        recorded_needs: For each gate recorded in all runs, by name: how likely each row needs retrieval.
        left_out: Number of rows that could not be used, by reason.
        run_index: Index into `runs` of each row; the first run for all rows by default.
    """

    settings: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    recorded_needs: Mapping[str, TableScores] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    run_index: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32), repr=False)

    def __post_init__(self) -> None:
        if not len(self.run_index):
            object.__setattr__(self, "run_index", np.zeros(len(self.rows), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_in_memory(self) -> bool:
        """Whether the rows are in memory; rows on disk are read again on each access."""
        return not isinstance(self.rows, storage.StoredRows)

    @property
    def open_book_right(self) -> BoolArray | None:
        """Whether the answer with passages is right, for each row. None if no row has such an answer.

        In a row without passages, because the search found none, the closed-book answer counts.
        """
        return self.final_right if self.has_open_book_answer.any() else None

    @property
    def retrieved_right(self) -> BoolArray:
        """Whether each answer is right if passages are always retrieved.

        If no row has an open-book answer, the closed-book answers count.
        """
        return self.closed_book_right if self.open_book_right is None else self.open_book_right

    @property
    def iterative_right(self) -> BoolArray | None:
        """Whether the answer after several rounds of retrieval is right, for each row.

        None unless there are open-book answers (with passages), and every row with one also has an iterative answer.
        """
        is_complete = self.has_iterative_answer[self.has_open_book_answer].all()
        return self.final_iterative_right if self.has_open_book_answer.any() and is_complete else None

    @property
    def mean_rounds(self) -> float:
        """Mean number of retrieval rounds of an iterative answer; 3 if not recorded."""
        recorded = self.retrieval_rounds[self.retrieval_rounds > 0]
        return float(np.mean(recorded)) if len(recorded) else DEFAULT_ROUNDS

    @property
    def n_without_passages(self) -> int:
        """Number of rows for which retrieval found no passage, so that only a closed-book answer exists."""
        return 0 if self.open_book_right is None else int((~self.has_open_book_answer).sum())

    @property
    def has_answer_lengths(self) -> bool:
        """Whether the rows hold answers; runs packed to their grades do not."""
        return bool(self.closed_book_tokens.any() or self.open_book_tokens.any())

    def find_recorded(self, gate: str) -> TableScores | None:
        """Return the recorded needs for retrieval of a gate, or None.

        Args:
            gate: Name of the gate. 'NAME,verdict=own' means the variant of NAME that decides by its scores before
                calibration.
        """
        column = self.recorded_needs.get(gate)
        if column is None and gate.endswith(OWN_VERDICT):
            base = self.recorded_needs.get(gate.removesuffix(OWN_VERDICT))
            column = base.make_raw_variant() if base is not None else None
        return column

    def get_slice_values(self, dimension: str) -> NDArray[np.object_]:
        """Return the group of each row along a dimension: 'language' gives ['en', None, ...]. None means unknown.

        A slice is a pair of a dimension and a group, such as ('language', 'en').
        """
        if dimension == ANSWER_FREQUENCY:
            counts = [None if count < 0 else count for count in self.answer_frequencies.tolist()]
            return np.array(assign_frequency_thirds(counts), dtype=object)
        slices_by_row = self.slices.tolist()  # a tuple of slices for each row
        # Millions of rows share few distinct tuples, so the group of each tuple is found only once.
        groups = {slices: dict(slices).get(dimension) for slices in set(slices_by_row)}
        return np.array([groups[slices] for slices in slices_by_row], dtype=object)

    def split_by_run(self) -> list[RunRows]:
        """Return the row numbers of each run."""
        return [RunRows(Path(run), np.flatnonzero(self.run_index == index)) for index, run in enumerate(self.runs)]

    def subset(self, numbers: Iterable[int], **changes: Any) -> LabelTable:
        """Return a table of the rows with these indices. Columns are not computed again.

        Args:
            numbers: The indices.
            changes: New values of other fields, such as `left_out`.
        """
        chosen = np.fromiter(numbers, dtype=np.int64)
        rows, readings = self._select_rows(chosen)
        subset = replace(
            self,
            rows=rows,
            readings=readings,
            run_index=self.run_index[chosen],
            recorded_needs={gate: column.select(chosen) for gate, column in self.recorded_needs.items()},
            **changes,
        )
        return fill_columns(subset, {name: column[chosen] for name, column in self.computed_columns.items()})

    def _select_rows(self, chosen: storage.RowNumbers) -> tuple[Sequence[LabelRow], Sequence[Reading]]:
        """Return the rows with these indices, and their readings (the LLM's signals)."""
        if not isinstance(self.rows, storage.StoredRows):
            return [self.rows[number] for number in chosen], [self.readings[number] for number in chosen]
        assert isinstance(self.readings, storage.StoredReadings)
        if len(chosen) > MAX_ROWS_IN_MEMORY:
            return self.rows.make_view(chosen), self.readings.make_view(chosen)  # they stay on disk
        rows = list(self.rows.take(chosen))  # read from disk now
        return rows, self.readings.load(chosen, rows)

    def chunks(self) -> Iterator[LabelTable]:
        """Yield the table in parts that fit into memory."""
        if self.is_in_memory:
            yield self
            return
        yield from map(self.subset, split_batches(range(len(self.rows)), CHUNK_ROWS))


def load_label_table(
    runs: Sequence[Path],
    *,
    layers: Sequence[int] | None = None,
    required_equal: Mapping[str, str] = EVALUATION_ADVICE,
    graded_only: bool = True,
    max_in_memory: int | None = None,
    grader: str | None = None,
) -> LabelTable:
    """Read the usable rows of label runs into one table.

    Args:
        runs: Folders of label runs.
        layers: Layers whose hidden states are read; None for all recorded ones.
        required_equal: Settings that the runs must share, each with advice for when they differ.
        graded_only: Leave out rows whose closed-book answer has no grade.
        max_in_memory: Leave rows on disk if there are more than this; None to keep all in memory.
        grader: Grader whose verdicts count; None for the one that the rows were labeled with.

    Raises:
        BadInput: If there is no run, or no usable row.
        BadSetting: If a run is named twice or the runs differ in a required setting.
    """
    if not runs:
        raise BadInput("no label run (recorded answers) is given. Give the folder of at least one label run.")
    folders = [RunFolder(run) for run in runs]
    settings = [folder.settings() for folder in folders]
    check_compatible(runs, settings, required_equal)
    builder = _TableBuilder(graded_only, max_in_memory, grader)
    for number, folder in enumerate(folders):
        n_before = builder.n_read
        builder.add_run(number, folder)
        warn_if_unfinished(folder.path, builder.n_read - n_before, settings[number].get("questions"))
    if not len(builder):
        raise _make_empty_error(runs, builder)
    columns, run_index = builder.build(folders, layers)
    warn_if_mixed(int(columns.is_synthetic.sum()), len(columns.rows))
    table = LabelTable(
        columns.rows,
        columns.readings,
        settings=_merge_settings(settings, grader),
        runs=[str(run) for run in runs],
        recorded_needs=load_scores(runs, columns.ids, run_index),
        left_out=builder.left_out,
        run_index=run_index,
    )
    return fill_columns(table, columns.computed_columns)


def _merge_settings(settings: Sequence[Mapping[str, Any]], grader: str | None) -> dict[str, Any]:
    """Return the settings of the first run, with a fingerprint of the data of all runs."""
    fingerprints = [str(run_settings.get("data_fingerprint")) for run_settings in settings]
    merged = {**settings[0], "data_fingerprint": sha256_text(*fingerprints)[:16]}
    if grader:  # another grader than that of the runs
        merged["grader"] = grader
    return merged


@dataclass
class _TableBuilder:
    """Collects the usable rows of several runs. Rows beyond `max_in_memory` stay on disk."""

    graded_only: bool  # leave out rows without a grade
    max_in_memory: int | None
    grader: str | None = None  # None for that of the rows
    graders: set[str] = field(default_factory=set)  # graders whose verdicts the rows hold, if one was asked for
    left_out: dict[str, int] = field(default_factory=lambda: {"failed": 0, "not graded": 0})  # by reason
    _rows: list[LabelRow] = field(default_factory=list)  # rows that are not in columns yet
    _run_index: array[int] = field(default_factory=lambda: array("i"))  # run of each row
    _offsets: array[int] = field(default_factory=lambda: array("q"))  # place of each row in its file
    _column_chunks: list[dict[str, NDArray[Any]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._run_index)

    @property
    def n_read(self) -> int:
        """Number of rows read so far, including unusable ones."""
        return len(self) + sum(self.left_out.values())

    @property
    def _is_on_disk(self) -> bool:
        """Whether there are too many rows to keep all in memory."""
        return self.max_in_memory is not None and len(self) > self.max_in_memory

    def add_run(self, run: int, folder: RunFolder) -> None:
        """Add the usable rows of a run, and count the others in `left_out`.

        Usable rows have an answer without passages.

        Args:
            run: Index of the run among all runs.
            folder: Folder of the run.
        """
        for where, record, offset in folder.records_with_offsets():
            row = row_from_json(record, where)
            if self.grader:  # take its verdicts, and note which graders there are, for an error message
                self.graders.update(list_graders(row))
                row = select_grader(row, self.grader)
            if row.error is not None:
                self.left_out["failed"] += 1
            elif row.closed is None or (self.graded_only and row.closed.correct is None):
                self.left_out["not graded"] += 1
            else:
                self._add_row(row, run, offset)

    def _add_row(self, row: LabelRow, run: int, offset: int) -> None:
        """Add a usable row with the index of its run and its place in the file."""
        self._rows.append(row)
        self._run_index.append(run)
        self._offsets.append(offset)
        if self._is_on_disk and len(self._rows) >= CHUNK_ROWS:
            self._convert_to_columns()

    def _convert_to_columns(self) -> None:
        """Replace the rows in memory by arrays of their columns. Arrays take much less memory than rows."""
        while self._rows:
            rows = self._rows[:CHUNK_ROWS]
            self._rows = self._rows[CHUNK_ROWS:]
            columns = LabelColumns(rows, [storage.build_draft_reading(row) for row in rows])
            self._column_chunks.append(
                {name: getattr(columns, name) for name in COLUMN_NAMES if name not in LAZY_COLUMNS}
            )

    def build(
        self, folders: Sequence[RunFolder], layers: Sequence[int] | None
    ) -> tuple[LabelColumns, NDArray[np.int32]]:
        """Build the columns of all collected rows.

        If there are too many rows for memory, the rows are read from disk on access, and only the columns are in memory.

        Args:
            folders: Folders of the runs.
            layers: Layers whose hidden states are read; None for all recorded ones.

        Returns:
            The columns, and for each row the index of the run that it belongs to.
        """
        run_index = np.array(self._run_index, dtype=np.int32)
        offsets = np.array(self._offsets, dtype=np.int64)
        run_layers = [storage.list_recorded_layers(folder) if layers is None else layers for folder in folders]
        stored_rows = storage.StoredRows(folders, run_index, offsets, self.grader)
        stored_readings = storage.StoredReadings(stored_rows, run_layers)
        if not self._is_on_disk:
            readings = stored_readings.load(np.arange(len(self)), self._rows)
            return LabelColumns(self._rows, readings), run_index
        self._convert_to_columns()  # the rows that are still in memory
        return fill_columns(LabelColumns(stored_rows, stored_readings), self._pop_columns()), run_index

    def _pop_columns(self) -> dict[str, NDArray[Any]]:
        """Join the chunks of each column, and free them, because together they take much memory."""
        columns = {}
        for name in list(self._column_chunks[0]):
            columns[name] = np.concatenate([chunk.pop(name) for chunk in self._column_chunks])
        return columns


def _make_empty_error(runs: Sequence[Path], builder: _TableBuilder) -> BadInput:
    """Make the error for runs without a graded row. It advises another grader, or questions with gold answers."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in builder.left_out.items() if count) or "no rows"
    advice = "Label questions that have gold answers."
    if builder.grader:
        graders = ", ".join(sorted(builder.graders))
        advice = f"grader='{builder.grader}' graded none of them; choose one of: {graders}."
    return BadInput(
        f"no question in {', '.join(map(str, runs))} is graded: {reasons}. {advice} To see the rows: knowgate report "
        f"{runs[0]}"
    )
