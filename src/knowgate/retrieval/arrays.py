"""The door for numpy's array files: mapped into memory, of the kind and shape they should have. Never pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.doors import check_regular
from knowgate.errors import BadInput

SCANNED = 10_000_000  # numbers that are looked at one by one on opening; larger files would take seconds

LARGEST = 1e15  # no score, place or part of a vector comes near it; larger ones overflow when they are multiplied


def read_array(path: Path, *, kind: Any, axes: int) -> NDArray[Any]:
    """kind: np.integer or np.floating."""
    try:
        check_regular(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        right = array.ndim == axes and np.issubdtype(array.dtype, kind)
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - numpy evaluates the header as Python and raises whatever that raises
        raise BadInput(f"{path.name} is damaged ({type(error).__name__}).") from None
    if not right:
        raise BadInput(f"{path.name} does not hold what it should.")
    if 0 < array.size <= SCANNED and not float(np.abs(array).max()) < LARGEST:
        raise BadInput(f"{path.name} holds values that are not numbers, or out of range.")
    found: NDArray[Any] = array
    return found
