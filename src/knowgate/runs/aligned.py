"""Needs on record as columns: what gates said of very many rows, a number for each row instead of a name and a number.

Gates are read one after another, so that the names of one are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.runs.needs import RecordedNeeds, each_needs, join_needs
from knowgate.runs.stored import PackedTexts
from knowgate.statistics import Floats


@dataclass(frozen=True, eq=False)
class AlignedNeeds(Mapping[str, float]):
    """Scores by key, in the order of the rows; NaN: none of that row."""

    keys_in_order: Sequence[str] = field(repr=False)
    scores: Floats = field(repr=False)

    def __len__(self) -> int:
        return int((~np.isnan(self.scores)).sum())

    def __iter__(self) -> Iterator[str]:
        return (key for key, score in zip(self.keys_in_order, self.scores, strict=True) if not np.isnan(score))

    def __getitem__(self, key: str) -> float:
        return float(self.scores[self._place[key]])

    @cached_property
    def _place(self) -> dict[str, int]:
        known = set(self)
        return {key: place for place, key in enumerate(self.keys_in_order) if key in known}


def needs_of(scores: Mapping[str, float], keys: Sequence[str]) -> Floats:
    """The score of each key; NaN where there is none."""
    if isinstance(scores, AlignedNeeds) and scores.keys_in_order is keys:
        return scores.scores
    return np.array([scores.get(key, np.nan) for key in keys], dtype=np.float64)


def some_needs(item: RecordedNeeds, chosen: NDArray[np.int64], keys: Sequence[str]) -> RecordedNeeds:
    """Of some of the rows, which have these keys."""
    needs, raw = (
        AlignedNeeds(keys, scores.scores[chosen]) if isinstance(scores, AlignedNeeds) else scores
        for scores in (item.needs, item.raw)
    )
    return replace(item, needs=needs, raw=raw)


def aligned_needs(
    runs: Sequence[Path], names: Sequence[str], keys: Sequence[str], run: NDArray[np.int32]
) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, as `shared_needs` finds them, with their scores in the rows' order.

    run: the number of each row's run.
    """
    parts: list[dict[str, _Said]] = []
    for number, path in enumerate(runs):
        places, start = np.flatnonzero(run == number), len(names[number]) + 1
        ids = PackedTexts.of(keys[place][start:] for place in places.tolist())
        parts.append({item.gate: _said(item, ids) for item in each_needs(path)})
    shared = [gate for gate in parts[0] if all(gate in part for part in parts)]
    return {gate: _joined([part[gate] for part in parts], names, keys, run) for gate in shared}


@dataclass(frozen=True)
class _Said:
    """What a gate said of one run, its scores as columns. about: the rest, with nothing but how many there were."""

    about: RecordedNeeds
    needs: Floats
    raw: Floats


def _said(item: RecordedNeeds, ids: Sequence[str]) -> _Said:
    counted = replace(item, needs=_Counted(item.needs), raw=_Counted(item.raw))
    return _Said(counted, needs_of(item.needs, ids), needs_of(item.raw, ids))


class _Counted(dict[str, Any]):
    """Nothing but how many there were."""

    def __init__(self, scores: Mapping[str, float]):
        super().__init__()
        self._n = len(scores)

    def __len__(self) -> int:
        return self._n


def _joined(said: Sequence[_Said], names: Sequence[str], keys: Sequence[str], run: NDArray[np.int32]) -> RecordedNeeds:
    item = join_needs([one.about for one in said], names)
    needs, raw = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
    for number, one in enumerate(said):
        needs[run == number], raw[run == number] = one.needs, one.raw
    has_raw = all(one.about.raw for one in said)
    return replace(item, needs=AlignedNeeds(keys, needs), raw=AlignedNeeds(keys, raw) if has_raw else {})
