"""The gate and threshold that skip most searches while the answers stay: chosen on some questions, for others.

A skip is a win where only the closed-book answer is right and a loss where only the open-book one is. A threshold will
do where (wins - losses) / n, with one loss added and 1.645 standard errors taken off, stays above the loss aimed at:
a one-sided 95 % bound that is not fooled by thresholds under which nothing has happened yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.statistics import Bools, Floats
from knowgate.thresholds import candidates

Z = 1.645  # the normal quantile of a one-sided 95 % bound


class Counts(NamedTuple):
    """Under each of several thresholds."""

    wins: NDArray[Any]
    losses: NDArray[Any]
    skipped: NDArray[Any]


@dataclass(frozen=True)
class Lever:
    """A gate whose threshold may be moved; only_at: for one that decides in more than one step, its own threshold."""

    gate: str
    needs: Floats = field(repr=False)
    right: Bools = field(repr=False)
    only_at: float | None = None


@dataclass(frozen=True)
class Choice:
    """A gate at a threshold, and what share of the questions it was chosen on it skips."""

    lever: Lever
    threshold: float
    skipped: float

    def skips(self, rows: Bools) -> Bools:
        return self.lever.needs[rows] <= self.threshold


@dataclass(frozen=True)
class Answered:
    """Which questions are answered right without passages and with them."""

    closed: Bools
    opened: Bools

    def right(self, choice: Choice, rows: Bools) -> Bools:
        """The final answers of a gate to some of the questions."""
        if choice.lever.only_at is not None:
            return choice.lever.right[rows]
        return np.where(choice.skips(rows), self.closed[rows], self.opened[rows])


def choose_gate(levers: Sequence[Lever], answered: Answered, rows: Bools, aim: float) -> Choice | None:
    """The one that skips most of these questions within the loss aimed at; None where none skips anything."""
    choices = [choice for lever in levers if (choice := _laxest(lever, answered, rows, aim)) is not None]
    return max(choices, key=lambda choice: choice.skipped, default=None)


def _laxest(lever: Lever, answered: Answered, rows: Bools, aim: float) -> Choice | None:
    needs = lever.needs[rows]
    thresholds = candidates(needs) if lever.only_at is None else np.array([lever.only_at])
    count = _moved if lever.only_at is None else _fixed
    counts = count(lever, answered, rows, thresholds)
    will_do = np.flatnonzero((_least(counts, len(needs)) >= -aim) & (counts.skipped > 0))
    if not len(will_do):
        return None
    return Choice(lever, float(thresholds[will_do[-1]]), float(counts.skipped[will_do[-1]]) / len(needs))


def _least(counts: Counts, n: int) -> Floats:
    """The lower bound of what is gained."""
    mean = (counts.wins - counts.losses - 1) / n
    bound: Floats = mean - Z * np.sqrt(np.maximum((counts.wins + counts.losses + 1) / n - mean**2, 0) / n)
    return bound


def _moved(lever: Lever, answered: Answered, rows: Bools, thresholds: Floats) -> Counts:
    needs, closed, opened = lever.needs[rows], answered.closed[rows], answered.opened[rows]
    order = np.argsort(needs, kind="stable")
    skipped = np.searchsorted(needs[order], thresholds, side="right")
    wins, losses = (np.concatenate([[0], np.cumsum(one[order])]) for one in (closed & ~opened, opened & ~closed))
    return Counts(wins[skipped], losses[skipped], skipped)


def _fixed(lever: Lever, answered: Answered, rows: Bools, thresholds: Floats) -> Counts:
    right, opened = lever.right[rows], answered.opened[rows]
    sums = (right & ~opened, opened & ~right, lever.needs[rows] <= thresholds[0])
    return Counts(*(np.array([one.sum()]) for one in sums))
