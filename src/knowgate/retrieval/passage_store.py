"""Passages in one file, read at random through a memory map, so that a corpus need not fit in memory.

`passages.jsonl` holds a JSON object per line, `offsets.npy` where each line begins and the last one ends.
"""

from __future__ import annotations

import functools
import json
import mmap
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from knowgate.core.nearest_neighbors import RowIndices
from knowgate.core.schema import read_record
from knowgate.core.text import fold_text
from knowgate.core.validation import check_regular_file, parse_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.types import Passage

MAX_SCANNED_VALUES = 10_000_000  # numbers that are looked at one by one on opening; larger files would take seconds

MAX_ABSOLUTE_VALUE = (
    1e15  # no score, place or part of a vector comes near it; larger ones overflow when they are multiplied
)


def read_array(path: Path, *, kind: Any, axes: int) -> NDArray[Any]:
    """kind: np.integer or np.floating."""
    try:
        check_regular_file(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        right = array.ndim == axes and np.issubdtype(array.dtype, kind)
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - numpy evaluates the header as Python and raises whatever that raises
        raise BadInput(f"{path.name} is damaged ({type(error).__name__}).") from None
    if not right:
        raise BadInput(f"{path.name} does not hold what it should.")
    if 0 < array.size <= MAX_SCANNED_VALUES and not float(np.abs(array).max()) < MAX_ABSOLUTE_VALUE:
        raise BadInput(f"{path.name} holds values that are not numbers, or out of range.")
    found: NDArray[Any] = array
    return found


PASSAGES_FILE, OFFSETS_FILE = "passages.jsonl", "offsets.npy"
PASSAGE_FIELDS = {"id", "title", "text"}  # of a passage in the file
TEXT_START, TEXT_END = b', "text": "', b'"}\n'
CACHED_PASSAGES = 16_384  # passages that were read: questions about one corpus find the same ones


class PassageWriter:
    """Appends passages to a new store; `close` writes the offsets."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = (folder / PASSAGES_FILE).open("wb")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def write(self, passages: Iterable[Passage]) -> None:
        for passage in passages:
            record = {"id": passage.id, "title": passage.title, "text": passage.text}
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            self._file.write(line)
            self._offsets.append(self._offsets[-1] + len(line))

    def close(self) -> None:
        self._file.close()
        np.save(self._folder / OFFSETS_FILE, np.frombuffer(self._offsets, dtype=np.int64))

    def __enter__(self) -> PassageWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PassageStore(Sequence[Passage]):
    """A read-only sequence of passages. A BadInput, ValueError or OSError on opening means the files are broken."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._offsets = np.asarray(
            read_array(folder / OFFSETS_FILE, kind=np.integer, axes=1)
        )  # a memmap's items are slow
        self._kept = functools.lru_cache(maxsize=CACHED_PASSAGES)(self._read)
        self._skims = functools.lru_cache(maxsize=CACHED_PASSAGES)(self._skimmed)
        check_regular_file(folder / PASSAGES_FILE)
        with (folder / PASSAGES_FILE).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        rising = len(self._offsets) > 1 and self._offsets[0] == 0 and bool((np.diff(self._offsets) > 0).all())
        if not rising or self._offsets[-1] != len(self._data):
            raise ValueError(f"{OFFSETS_FILE} does not fit {PASSAGES_FILE}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self._read(one) for one in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self._kept(row % len(self))

    def texts_with(self, rows: RowIndices, words: Sequence[str]) -> list[str]:
        """Texts of the passages that may hold all words (of `landmarks`): of all that do, and perhaps of others.

        The other lines are not taken apart, only looked at as they stand in the file, title and all.
        """
        chosen = rows.tolist()
        for word in (word.encode() for word in words):
            chosen = [row for row in chosen if word in self._skims(row)]
        return [self._text(row) for row in chosen]

    def _skimmed(self, row: int) -> bytes:
        line = self._line(row)
        if line.isascii():  # most are, and bytes are faster
            return line.lower().replace(b",", b"")
        return fold_text(line.decode(errors="replace")).encode(errors="replace")

    def _text(self, row: int) -> str:
        """The text alone: cut out of its line, where nothing in it is escaped."""
        line = self._line(row)
        start = line.find(TEXT_START)
        if b"\\" in line or start < 0 or not line.endswith(TEXT_END):
            return self[row].text
        return line[start + len(TEXT_START) : -len(TEXT_END)].decode(errors="replace")

    def _line(self, row: int) -> bytes:
        return self._data[int(self._offsets[row]) : int(self._offsets[row + 1])]

    def _read(self, row: int) -> Passage:
        try:
            record = parse_json(self._line(row).decode(), "it")
            if (
                isinstance(record, dict)
                and record.keys() == PASSAGE_FIELDS
                and all(type(x) is str for x in record.values())
            ):
                return Passage(**record)
            return read_record(Passage, record, "it")
        except (BadInput, UnicodeDecodeError):
            raise BrokenIndex(
                f"passage {row} of the index '{self._folder}' is damaged. "
                f"Rebuild it: delete the folder, then knowgate index SOURCE --out {self._folder}"
            ) from None


def format_indexed_text(passage: Passage) -> str:
    """What is searched: the title counts as part of the passage."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text
