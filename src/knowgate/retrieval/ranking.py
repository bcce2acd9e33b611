"""Picks the best rows of an array of scores, the same ones every time. Knows nothing of what was scored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting


def best_rows(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Indices of the k highest scores, best first; of equal scores the lower index comes first."""
    rows = np.arange(len(scores))
    if k < len(scores):
        border = np.partition(scores, len(scores) - k)[len(scores) - k]
        rows = np.flatnonzero(scores >= border)
    order = np.argsort(-scores[rows], kind="stable")
    chosen: NDArray[np.intp] = rows[order[:k]]
    return chosen


def check_k(k: int) -> None:
    if k < 1:
        raise BadSetting(f"k is {k}; a search asks for at least 1 passage.")
