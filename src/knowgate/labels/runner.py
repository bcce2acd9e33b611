"""The local runner: batches in this process, grown until each takes a few seconds.

A distributed runner fulfils the same protocol (`types.Runner`): it may do any batch anywhere and more than once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from knowgate.types import Question, Result


@dataclass(frozen=True)
class LocalRunner:
    """Starts with `first` questions and takes more while a batch takes less than `seconds`, up to `largest`.

    Twice as many, four times where it took less than a quarter: a GPU takes as long for four questions as for hundreds.
    So rows appear soon on a slow machine, and a fast one is kept busy.
    """

    first: int = 4
    largest: int = 2_048
    seconds: float = 10.0

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        size, place = self.first, 0
        while place < len(questions):
            batch = questions[place : place + size]
            start = time.perf_counter()
            yield work(batch)
            place += len(batch)
            size = self.next_size(size, time.perf_counter() - start)

    def next_size(self, size: int, took: float) -> int:
        """How many after a batch of `size` that took so many seconds."""
        if took >= self.seconds:
            return size
        return min(self.largest, size * (4 if took < self.seconds / 4 else 2))
