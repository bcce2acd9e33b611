"""Is one gate better than another on the same questions? McNemar's test, and Holm's correction for many questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.errors import MissingExtra
from knowgate.statistics.measures import Bools


@dataclass(frozen=True)
class Comparison:
    """Gate against another: difference of accuracy with its interval, two p-values, and those after Holm."""

    gate: str
    against: str
    difference: float
    low: float
    high: float
    p_bootstrap: float
    p_mcnemar: float
    only_gate: int
    only_against: int
    p_holm: float = 1.0  # of McNemar's, over all comparisons of the table


def mcnemar(first: Bools, second: Bools) -> tuple[float, int, int]:
    """Exact two-sided McNemar test: p-value, questions only the first has right, only the second."""
    try:
        from scipy.stats import binomtest
    except ModuleNotFoundError:
        raise MissingExtra("comparing gates", "train") from None
    a, b = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    return (float(binomtest(a, a + b, 0.5).pvalue) if a + b else 1.0), a, b


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest p-value times the number of tests not yet decided."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, p_values[number] * (len(p_values) - rank)))
        corrected[number] = highest
    return corrected
