"""Readings rebuilt from label rows, and sequences of rows that stay on disk.

Large label runs do not fit into memory. The sequences here hold the byte offset of each row and read rows when they
are used: iterating in order reads each file once, and indexing reads a single row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from knowgate.core import split_batches
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow, row_from_json, select_grader
from knowgate.types import Completion, Question, Reading, Vector

Item = TypeVar("Item", covariant=True)
RowNumbers = NDArray[np.int64]
READING_BATCH = 1_000  # rows whose readings are in memory at once
MAX_HALF = float(np.finfo(np.float16).max)  # largest number in half precision


# --- readings -------------------------------------------------------------------------------------


def question_from_row(row: LabelRow) -> Question:
    """Build the question that a label row answers."""
    return Question(row.question, id=row.id, answers=row.answers, lang=row.lang, choices=row.choices, meta=row.meta)


def load_readings(folder: RunFolder, rows: Sequence[LabelRow], layers: Sequence[int] = ()) -> list[Reading]:
    """Rebuild the reading of each row: its draft, samples, signals and hidden states.

    The draft is the answer without passages.

    Args:
        folder: Label run that holds the rows.
        rows: Rows of the run.
        layers: Layers whose hidden states before and after the draft are included.
    """
    before = {layer: folder.vectors(rows, f"before.{layer}") for layer in layers}
    after = {layer: folder.vectors(rows, f"after.{layer}") for layer in layers}
    return [
        Reading(
            draft=_completion_from_answer(row.closed),
            samples=tuple(Completion(text) for text in row.closed.samples) if row.closed else (),
            hidden={layer: states[number] for layer, states in before.items()},
            hidden_after={layer: states[number] for layer, states in after.items()},
            signals=row.signals,
        )
        for number, row in enumerate(rows)
    ]


def build_draft_reading(row: LabelRow) -> Reading:
    """Rebuild the closed-book reading of a row from its draft and recorded signals, without states and samples."""
    return Reading(draft=_completion_from_answer(row.closed), signals=row.signals)


def list_recorded_layers(folder: RunFolder) -> list[int]:
    """List the layers whose hidden states a run holds."""
    return sorted(int(name.removeprefix("before.")) for name in folder.vector_names() if name.startswith("before."))


def pack_hidden_states(readings: Sequence[Reading]) -> dict[str, Vector]:
    """Stack the hidden states of all readings by layer and position.

    'before.LAYER' is before the answer, 'after.LAYER' at its end.
    """
    layers = list(readings[0].hidden)  # all readings have the same layers
    before = {f"before.{layer}": np.stack([reading.hidden[layer] for reading in readings]) for layer in layers}
    after = {f"after.{layer}": np.stack([reading.hidden_after[layer] for reading in readings]) for layer in layers}
    return {name: _to_half_precision(states) for name, states in {**before, **after}.items()}


def _to_half_precision(states: Vector) -> Vector:
    """Convert to float16, unless a value is too large for it, as in some layers of some models."""
    return states.astype(np.float16) if float(np.abs(states).max(initial=0)) < MAX_HALF else states


def _completion_from_answer(answer: GradedAnswer | None) -> Completion | None:
    """Convert a stored answer back to the output of the LLM, or None."""
    if answer is None:
        return None
    return Completion(answer.text, answer.tokens, answer.finished, len(answer.tokens or ()))


# --- sequences on disk ----------------------------------------------------------------------------


class LazySequence(Sequence[Item], Generic[Item]):
    """A sequence that creates its items on access, for example from disk. Subclasses implement `take` and `__len__`."""

    def take(self, numbers: RowNumbers) -> Iterator[Item]:
        """Yield the items with these indices, in this order."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Item]:
        return self.take(np.arange(len(self)))

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        numbers = np.arange(len(self))[index]  # raises IndexError for an index that does not exist
        return list(self.take(numbers)) if isinstance(index, slice) else next(self.take(np.array([numbers])))


@dataclass(frozen=True, eq=False)
class StoredRows(LazySequence[LabelRow]):
    """Label rows of several runs, kept on disk.

    Attributes:
        folders: Run folders.
        run_index: Index into `folders` of each row.
        offsets: Byte offset of each row in the file of its run.
        grader: Grader whose verdicts count; None for the one that the rows were labeled with.
    """

    folders: Sequence[RunFolder]
    run_index: NDArray[np.int32] = field(repr=False)
    offsets: RowNumbers = field(repr=False)
    grader: str | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, numbers: RowNumbers) -> Iterator[LabelRow]:
        for run, group in _group_by_run(self.run_index, numbers):
            folder = self.folders[run]
            for record in folder.records_at(self.offsets[group].tolist()):
                row = row_from_json(record, str(folder.path))
                yield select_grader(row, self.grader) if self.grader else row

    def make_view(self, numbers: RowNumbers) -> StoredRows:
        """Return the rows with these indices, still on disk."""
        return StoredRows(self.folders, self.run_index[numbers], self.offsets[numbers], self.grader)


@dataclass(frozen=True, eq=False)
class StoredReadings(LazySequence[Reading]):
    """Readings (the LLM's signals) of rows that stay on disk.

    Attributes:
        rows: The rows.
        layers: For each run folder, the layers whose hidden states are read.
    """

    rows: StoredRows
    layers: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: RowNumbers) -> Iterator[Reading]:
        for batch in split_batches(numbers, READING_BATCH):
            yield from self.load(batch, list(self.rows.take(batch)))

    def load(self, numbers: RowNumbers, rows: Sequence[LabelRow]) -> list[Reading]:
        """Return the readings of some rows, with hidden states from disk.

        Args:
            numbers: Indices of the rows in the table.
            rows: The rows themselves, in the same order, which the caller has read already.
        """
        readings: list[Reading] = []
        for run, group in _group_by_run(self.rows.run_index, numbers):
            rows_of_group = rows[len(readings) : len(readings) + len(group)]  # each earlier row has given one reading
            readings += load_readings(self.rows.folders[run], rows_of_group, self.layers[run])
        return readings

    def make_view(self, numbers: RowNumbers) -> StoredReadings:
        """Return the readings with these indices, still on disk."""
        return StoredReadings(self.rows.make_view(numbers), self.layers)


@dataclass(frozen=True, eq=False)
class StoredQuestions(LazySequence[Question]):
    """Questions of rows that stay on disk."""

    rows: StoredRows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: RowNumbers) -> Iterator[Question]:
        return map(question_from_row, self.rows.take(numbers))


def _group_by_run(run_index: NDArray[np.int32], numbers: RowNumbers) -> Iterator[tuple[int, RowNumbers]]:
    """Split row numbers where the run changes. Then the file of a run is opened once per group.

    Args:
        run_index: Index of the run of every row.
        numbers: The row numbers to split.

    Yields:
        The index of the run, and the row numbers of the group.
    """
    if not len(numbers):
        return
    boundaries = np.flatnonzero(np.diff(run_index[numbers])) + 1  # where the next row belongs to another run
    for group in np.split(numbers, boundaries):
        yield int(run_index[group[0]]), group
