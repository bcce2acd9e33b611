"""Passages on disk, read through a memory map, so that a corpus need not fit in memory.

`passages.jsonl` holds one JSON object per line. `offsets.npy` holds the start of each line and the end of the file.
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

from knowgate.core.schema import read_record
from knowgate.core.validation import check_regular_file, parse_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.types import Passage

MAX_SCANNED_VALUES = 10_000_000  # larger arrays are not checked value by value, which would take seconds
MAX_ABSOLUTE_VALUE = 1e15  # far above any score or offset; larger values could overflow when multiplied

PASSAGES_FILE, OFFSETS_FILE = "passages.jsonl", "offsets.npy"
PASSAGE_FIELDS = {"id", "title", "text"}
CACHED_PASSAGES = 16_384  # questions about one corpus often find the same passages


def read_array(path: Path, *, kind: Any, axes: int) -> NDArray[Any]:
    """Memory-map a `.npy` file after checking its type, shape and values; pickled arrays are refused.

    Args:
        path: The file.
        kind: `np.integer` or `np.floating`.
        axes: The number of dimensions.

    Raises:
        BadInput: The file is damaged or holds something else.
    """
    try:
        check_regular_file(path)
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        is_expected = values.ndim == axes and np.issubdtype(values.dtype, kind)
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - numpy evaluates the header as Python, which can raise anything
        raise BadInput(f"{path.name} is damaged ({type(error).__name__}).") from None
    if not is_expected:
        raise BadInput(f"{path.name} has the wrong type or shape: {values.dtype}, {values.shape}.")
    if 0 < values.size <= MAX_SCANNED_VALUES and not float(np.abs(values).max()) < MAX_ABSOLUTE_VALUE:
        raise BadInput(f"{path.name} holds values that are not numbers or out of range.")
    return values


class PassageWriter:
    """Appends passages to a new store. Closing it writes the offsets."""

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

    def __enter__(self) -> PassageWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        np.save(self._folder / OFFSETS_FILE, np.frombuffer(self._offsets, dtype=np.int64))


class PassageStore(Sequence[Passage]):
    """A read-only sequence of the passages in a folder.

    Raises:
        BadInput, ValueError, OSError: The files are missing or damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        offsets = read_array(folder / OFFSETS_FILE, kind=np.integer, axes=1)
        self._offsets = np.asarray(offsets)  # indexing a memmap item by item is slow
        self._read_cached = functools.lru_cache(maxsize=CACHED_PASSAGES)(self._read)
        check_regular_file(folder / PASSAGES_FILE)
        with (folder / PASSAGES_FILE).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        is_increasing = len(offsets) > 1 and offsets[0] == 0 and bool((np.diff(self._offsets) > 0).all())
        if not is_increasing or offsets[-1] != len(self._data):
            raise ValueError(f"{OFFSETS_FILE} does not match {PASSAGES_FILE}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self._read(index) for index in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self._read_cached(row % len(self))

    def _read_line(self, row: int) -> bytes:
        return self._data[int(self._offsets[row]) : int(self._offsets[row + 1])]

    def _read(self, row: int) -> Passage:
        try:
            record = parse_json(self._read_line(row).decode(), "it")
            return Passage(**record) if _is_plain_record(record) else read_record(Passage, record, "it")
        except (BadInput, UnicodeDecodeError):
            raise BrokenIndex(
                f"passage {row} of the index '{self._folder}' is damaged. Delete the folder and rebuild it with "
                "`knowgate index` or build_index."
            ) from None


def _is_plain_record(record: Any) -> bool:
    """Return whether a record has exactly the fields of a stored passage, so that it needs no further checks."""
    has_fields = isinstance(record, dict) and record.keys() == PASSAGE_FIELDS
    return has_fields and all(type(value) is str for value in record.values())
