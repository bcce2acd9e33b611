"""Recorded rows back to readings: what gates saw then, without running the LLM again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow, row_from_json
from knowgate.types import Completion, Question, Reading


def question_from_row(row: LabelRow) -> Question:
    return Question(row.question, id=row.id, answers=row.answers, lang=row.lang, choices=row.choices, meta=row.meta)


def load_readings(folder: RunFolder, rows: Sequence[LabelRow], layers: Sequence[int] = ()) -> list[Reading]:
    """The reading of each row's bare question, with the hidden states of these layers."""
    before = {layer: folder.vectors(rows, f"before.{layer}") for layer in layers}
    after = {layer: folder.vectors(rows, f"after.{layer}") for layer in layers}
    return [
        Reading(
            draft=_completion(row.closed),
            samples=tuple(Completion(text) for text in row.closed.samples) if row.closed else (),
            hidden={layer: block[number] for layer, block in before.items()},
            hidden_after={layer: block[number] for layer, block in after.items()},
            signals=row.signals,
        )
        for number, row in enumerate(rows)
    ]


def build_draft_reading(row: LabelRow) -> Reading:
    """A row's reading without hidden states and samples."""
    return Reading(draft=_completion(row.closed), signals=row.signals)


def list_recorded_layers(folder: RunFolder) -> list[int]:
    """Layers whose states a run has kept."""
    return sorted(int(name.removeprefix("before.")) for name in folder.vector_names() if name.startswith("before."))


def _completion(side: GradedAnswer | None) -> Completion | None:
    if side is None:
        return None
    return Completion(side.text, side.tokens, side.finished, len(side.tokens or ()))


Item = TypeVar("Item", covariant=True)
RowNumbers = NDArray[np.int64]


class LazySequence(Sequence[Item], Generic[Item]):
    """A sequence whose items are made when they are asked for; `taken` makes those of some numbers, in their order."""

    def taken(self, numbers: RowNumbers) -> Iterator[Item]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Item]:
        return self.taken(np.arange(len(self)))

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice):
            return list(self.taken(np.arange(len(self))[place]))
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return next(iter(self.taken(np.array([place % len(self)]))))


@dataclass(frozen=True, eq=False)
class StoredRows(LazySequence[LabelRow]):
    """Rows of several runs. run: the number of each row's folder; places: where in its file it begins."""

    folders: Sequence[RunFolder]
    run: NDArray[np.int32] = field(repr=False)
    places: RowNumbers = field(repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def taken(self, numbers: RowNumbers) -> Iterator[LabelRow]:
        for run, group in _by_run(self.run, numbers):
            folder = self.folders[run]
            for record in folder.records_at(self.places[group].tolist()):
                yield row_from_json(record, str(folder.path))

    def some(self, numbers: RowNumbers) -> StoredRows:
        return StoredRows(self.folders, self.run[numbers], self.places[numbers])


@dataclass(frozen=True, eq=False)
class StoredReadings(LazySequence[Reading]):
    """What gates saw of such rows. layers: of each run, those whose hidden states are read."""

    rows: StoredRows
    layers: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def taken(self, numbers: RowNumbers) -> Iterator[Reading]:
        for start in range(0, len(numbers), 1_000):
            some = numbers[start : start + 1_000]
            yield from self.of(some, list(self.rows.taken(some)))

    def of(self, numbers: RowNumbers, rows: Sequence[LabelRow]) -> list[Reading]:
        """Of rows that are in memory, which have these numbers."""
        found, left = list[Reading](), iter(rows)
        for run, group in _by_run(self.rows.run, numbers):
            some = list(itertools.islice(left, len(group)))
            found += load_readings(self.rows.folders[run], some, self.layers[run])
        return found

    def some(self, numbers: RowNumbers) -> StoredReadings:
        return StoredReadings(self.rows.some(numbers), self.layers)


@dataclass(frozen=True, eq=False)
class PackedTexts(LazySequence[str]):
    """Many short texts in one piece of memory: a tenth of what they take one by one."""

    data: bytes = field(repr=False)
    ends: RowNumbers = field(repr=False)

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedTexts:
        data, ends = bytearray(), [0]
        for text in texts:
            data += text.encode(errors="surrogatepass")
            ends.append(len(data))
        return cls(bytes(data), np.array(ends))

    @classmethod
    def joined(cls, parts: Sequence[PackedTexts]) -> PackedTexts:
        starts = itertools.accumulate((len(part.data) for part in parts), initial=0)
        ends = [part.ends[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls(b"".join(part.data for part in parts), np.concatenate([[0], *ends]))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def taken(self, numbers: RowNumbers) -> Iterator[str]:
        for number in numbers.tolist():
            yield self.data[self.ends[number] : self.ends[number + 1]].decode(errors="surrogatepass")

    def some(self, numbers: RowNumbers) -> PackedTexts:
        return PackedTexts.of(self.taken(numbers))


@dataclass(frozen=True, eq=False)
class MappedSequence(LazySequence[Item]):
    """Something made of every item of another sequence, anew whenever it is asked for."""

    items: LazySequence[Any]
    make: Callable[[Any], Item]

    def __len__(self) -> int:
        return len(self.items)

    def taken(self, numbers: RowNumbers) -> Iterator[Item]:
        return map(self.make, self.items.taken(numbers))


def _by_run(run: NDArray[np.int32], numbers: RowNumbers) -> Iterator[tuple[int, RowNumbers]]:
    """The numbers in their order, in stretches that are of one run."""
    if not len(numbers):
        return
    runs = run[numbers]
    edges = np.flatnonzero(np.diff(runs)) + 1
    for group in np.split(numbers, edges):
        yield int(run[group[0]]), group
