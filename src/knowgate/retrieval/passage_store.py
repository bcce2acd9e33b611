"""Store passages on disk and read them through a memory map, so that a corpus need not fit in memory.

`passages.jsonl` holds one JSON object per line. `offsets.npy` holds the position of the start of each line, followed by
the length of the file.
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

MAX_SCANNED_VALUES = 10_000_000  # the values of larger arrays are not checked, because that would take seconds
MAX_ABSOLUTE_VALUE = 1e15  # far above any score or offset; larger values could overflow when multiplied

PASSAGES_FILE, OFFSETS_FILE = "passages.jsonl", "offsets.npy"
CACHED_PASSAGES = 16_384  # passages kept in memory, because many questions find the same ones


def read_array(path: Path, *, kind: Any, axes: int) -> NDArray[Any]:
    """Memory-map a `.npy` file after checking its type, shape and values.

    Pickled arrays are rejected, because they could run code.

    Args:
        path: The file.
        kind: The expected type of the values, `np.integer` or `np.floating`.
        axes: The expected number of dimensions.

    Raises:
        BadInput: The file is damaged, or the type, the shape or a value is not as expected.
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
    # `not ... <` instead of `>=` also rejects NaN.
    if 0 < values.size <= MAX_SCANNED_VALUES and not float(np.abs(values).max()) < MAX_ABSOLUTE_VALUE:
        raise BadInput(f"{path.name} contains values that are not numbers or are out of range.")
    return values


def create_array(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Create an uninitialized array in a `.npy` file, as a writable memory map."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


class PassageWriter:
    """Writes the passages of a new store.

    A context manager: leaving the block writes the offsets.

    Args:
        folder: The folder to write. An existing `passages.jsonl` is overwritten.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = (folder / PASSAGES_FILE).open("wb")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def write(self, passages: Iterable[Passage]) -> None:
        """Append passages to the store; their scores are not stored."""
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

    Passages are checked when they are read.

    Args:
        folder: The folder with `passages.jsonl` and `offsets.npy`.

    Raises:
        BadInput: A file is damaged.
        ValueError: The two files do not belong together.
        OSError: A file is missing or cannot be read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        offsets = read_array(folder / OFFSETS_FILE, kind=np.integer, axes=1)
        self._offsets = np.asarray(offsets)  # reading single items of a np.memmap object is slow
        self._read_cached = functools.lru_cache(maxsize=CACHED_PASSAGES)(self._read)
        check_regular_file(folder / PASSAGES_FILE)
        with (folder / PASSAGES_FILE).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        is_increasing = len(offsets) > 1 and offsets[0] == 0 and bool((np.diff(self._offsets) > 0).all())
        if not is_increasing or offsets[-1] != len(self._data):
            raise ValueError(f"the positions in {OFFSETS_FILE} do not match the passages in {PASSAGES_FILE}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        rows = range(len(self))[row]  # counts a negative row from the end, or raises IndexError
        return self._read_cached(rows) if isinstance(rows, int) else [self._read(index) for index in rows]

    def _read(self, row: int) -> Passage:
        """Read and check one passage; raise BrokenIndex if its line is damaged."""
        line = self._data[int(self._offsets[row]) : int(self._offsets[row + 1])]
        try:
            return read_record(Passage, parse_json(line.decode(), "it"), "it")
        except (BadInput, UnicodeDecodeError):
            raise BrokenIndex(
                f"passage {row} of the index '{self._folder}' is damaged. Delete the folder and rebuild it with "
                "`knowgate index` or build_index."
            ) from None
