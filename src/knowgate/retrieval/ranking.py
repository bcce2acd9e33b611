"""How many passages a search may be asked for, and which of very many scores are worth ranking."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting

STRETCH = 1_000  # passages whose highest score is looked at first


def check_k(k: int) -> None:
    if k < 1:
        raise BadSetting(f"k is {k}; a search asks for at least 1 passage.")


def rows_worth_ranking(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Rising rows with a score above 0, all of the k best and whatever equals them among them.

    Most passages share no word with a query, and of those that do few can be among the best: where k stretches of
    passages each have one that reaches some score, no lower one is. At a million passages that halves a search.
    """
    whole = len(scores) - len(scores) % STRETCH
    if k > whole // STRETCH:
        return np.flatnonzero(scores > 0)
    heights = scores[:whole].reshape(-1, STRETCH).max(axis=1)
    border = np.partition(heights, len(heights) - k)[len(heights) - k]
    return np.flatnonzero(scores >= border) if border > 0 else np.flatnonzero(scores > 0)
