"""Many questions as few cells: those of about the same need and the same two verdicts are counted together.

A bootstrap over a million questions measures a thousand cells instead. The draws are those of the questions, and what a
resample has in each cell is counted exactly; within a cell all questions have its mean need. Cells end where the
verdict of the gate or the bin of the calibration error changes, so decisions are exact, and only the order of questions
whose needs are next to each other is lost. What that does to a measure is known from all questions and taken off: what
is left moves no measure of a resample by 5e-5 (30,000 questions; there is a test).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.statistics import Bools, Floats, Measure, Weights, ece_bins

LEVELS = 1_024  # of need, of equal numbers of questions


@dataclass(frozen=True)
class Judged:
    """Questions with a gate's needs and their verdicts; opened: None without open-book answers."""

    needs: Floats
    threshold: float
    closed: Bools
    opened: Bools | None

    @property
    def retrieve(self) -> Bools:
        return self.needs > self.threshold


@dataclass(frozen=True)
class Cells:
    """Cells as if each were a question, and the number of the cell that every question is in."""

    judged: Judged
    code: NDArray[np.int32]

    def count(self, weights: Weights) -> Weights:
        """How often each cell is drawn, of how often each question is."""
        size = len(self.judged.needs)
        return np.stack([np.bincount(self.code, weights=row, minlength=size) for row in weights])

    def measure(self, inner: Measure) -> Measure:
        """A measure of cells, for weights of questions."""
        return lambda weights: inner(self.count(weights))


def cells_of(judged: Judged) -> Cells:
    level = _levels(judged)
    opened = judged.closed if judged.opened is None else judged.opened
    number = level.astype(np.int64) * 4 + 2 * judged.closed + opened
    kinds, code = np.unique(number, return_inverse=True)
    means = _means(judged.needs, level)[kinds // 4]
    verdicts = (kinds % 4) // 2 == 1, kinds % 2 == 1
    one = Judged(means, judged.threshold, verdicts[0], None if judged.opened is None else verdicts[1])
    return Cells(one, code.astype(np.int32))


def _levels(judged: Judged) -> NDArray[np.int32]:
    """Rising with need: equal needs are in one level, and a level does not reach over a threshold or a bin's end."""
    order = np.argsort(judged.needs, kind="stable")
    needs = judged.needs[order]
    first = np.searchsorted(needs, needs, side="left")  # where each run of equal needs begins
    sides = (first * LEVELS // len(needs), ece_bins(needs), needs > judged.threshold)
    begins = np.zeros(len(needs), dtype=bool)
    for side in sides:
        begins[1:] |= side[1:] != side[:-1]
    level = np.empty(len(needs), dtype=np.int32)
    level[order] = np.cumsum(begins)
    return level


def _means(needs: Floats, level: NDArray[np.int32]) -> Floats:
    """The mean need of each level; where all are equal, that need to the last bit."""
    means = np.bincount(level, weights=needs) / np.bincount(level)
    low, high = np.full(len(means), np.inf), np.full(len(means), -np.inf)
    np.minimum.at(low, level, needs)
    np.maximum.at(high, level, needs)
    return np.clip(means, low, high)
