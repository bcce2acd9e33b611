"""Several trainings of one judge, and which rows each learns from: other seeds, or other parts of the rows.

With folds every row teaches some judges and is scored by one that never saw it. Knows row numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting
from knowgate.fitting.judges.settings import JudgeTraining
from knowgate.runs import Split, hashed_share, seen_key
from knowgate.statistics import Bools, Floats

SEEDS = "Judges to train and average."
FOLDS = "Or so many, each leaving a part out."
MOST = 20


@dataclass(frozen=True)
class Member:
    """One training: its settings, and the rows it learns from and stops by."""

    training: JudgeTraining
    train: tuple[int, ...]
    dev: tuple[int, ...]

    @property
    def learnt(self) -> frozenset[int]:
        return frozenset((*self.train, *self.dev))


def crew(
    split: Split, training: JudgeTraining, seeds: int = 1, folds: int = 0, texts: Sequence[str] = ()
) -> list[Member]:
    """So many seeds on the train split; or a judge for each fold of all rows, with no look at a dev split.

    texts: the questions, by which folds are made.
    """
    _check(seeds, folds)
    if not folds:
        rows = tuple(split.train.tolist()), tuple(split.dev.tolist())
        return [Member(replace(training, seed=training.seed + number), *rows) for number in range(seeds)]
    part = fold_of(texts, folds, training.seed)
    lasting = replace(training, checks=1, patience=0)
    return [
        Member(replace(lasting, seed=training.seed + fold), tuple(np.flatnonzero(part != fold).tolist()), ())
        for fold in range(folds)
    ]


def fold_of(texts: Sequence[str], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each question, by its hash: equal questions go together."""
    return np.array([int(folds * hashed_share("fold", str(seed), seen_key(text))) for text in texts], dtype=np.int64)


def unseen_mean(votes: Sequence[Floats], members: Sequence[Member], places: Sequence[int]) -> Floats:
    """For each row the mean vote of those who did not learn from it; of all where everybody did."""
    strange: Bools = np.array([[place not in member.learnt for place in places] for member in members], dtype=bool)
    strange |= ~strange.any(axis=0)
    mean: Floats = np.average(np.array(votes), axis=0, weights=strange)
    return mean


def _check(seeds: int, folds: int) -> None:
    if not 1 <= seeds <= MOST:
        raise BadSetting(f"training: seeds is {seeds}; it must be 1 to {MOST}.")
    if folds and not 2 <= folds <= MOST:
        raise BadSetting(f"training: folds is {folds}; it must be 2 to {MOST}, or 0 for none.")
    if folds and seeds > 1:
        raise BadSetting("training: give seeds or folds, not both: with folds every judge has its own seed already.")
