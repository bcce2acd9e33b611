"""Beginnings of prompts that stay in an engine: computed once, taken over by every prompt that starts alike.

Prompts of one kind begin with the same system turn and instruction; a question at the end differs. The first rows of
the engine keep what was computed last; another prompt takes over, by reference, as many tokens as it begins with
alike. Results are the same up to rounding. Knows tokens and rows; not prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from knowgate.models.llama.engine import Engine, Fed

KEPT = 4  # rows of beginnings: a few kinds of prompts take turns when questions are asked
SHORTEST = 16  # tokens worth taking over
LONGEST = 256  # tokens that are kept of a prompt that may not come again: every other row looks through them
MOST = 0.75  # of what prompts share: a beginning that covers so much will do


class Begun(NamedTuple):
    """So many tokens of a prompt are in this row already."""

    row: int
    length: int


@dataclass
class Beginnings:
    """What the first rows hold, the one used last at the end; all other rows are for prompts and answers."""

    kept: dict[int, list[int]] = field(default_factory=dict)
    times_cleared: int = 0  # the engine, when they were put there

    def start(self, engine: Engine, ids: Sequence[list[int]], *, room: int, most: int) -> int:
        """Begin rows KEPT, KEPT + 1, ... for these prompts; gives how many tokens of each are there already.

        room: cells that prompts and answers may come to; most: tokens that may be there. What those rows held is gone.
        """
        if self.times_cleared != engine.times_cleared or sum(map(len, self.kept.values())) + room > engine.cells:
            self._forget(engine)
        for row in [row for row in engine.filled if row >= KEPT]:
            engine.cut(row)
        begun = self._begun(engine, ids)
        length = min(begun.length, most)
        if length:
            self.kept[begun.row] = self.kept.pop(begun.row)
            for place in range(len(ids)):
                engine.copy(begun.row, KEPT + place, length)
        return length

    def keep(self, engine: Engine, tokens: list[int], begun: int) -> None:
        """The first prompt was computed: its beginning is kept, unless most of it was there before."""
        if begun < MOST * (len(tokens) - 1) and len(tokens) > SHORTEST:
            row, tokens = self._free(engine), tokens[:LONGEST]
            engine.copy(KEPT, row, len(tokens))
            self.kept[row] = tokens

    def _forget(self, engine: Engine) -> None:
        self.kept.clear()
        engine.clear()
        self.times_cleared = engine.times_cleared

    def _begun(self, engine: Engine, ids: Sequence[list[int]]) -> Begun:
        shared = common(ids)
        best = max(
            (Begun(row, alike(tokens, shared)) for row, tokens in self.kept.items()),
            key=lambda begun: begun.length,
            default=Begun(0, 0),
        )
        if len(ids) > 1 and len(shared) >= SHORTEST and best.length < MOST * len(shared):
            return self._extend(engine, best, shared)
        return best if best.length >= SHORTEST else Begun(0, 0)

    def _extend(self, engine: Engine, best: Begun, shared: list[int]) -> Begun:
        """Compute what several prompts share, as far as it is not there."""
        row = self._free(engine, but=best.row)
        if best.length:
            engine.copy(best.row, row, best.length)
        engine.feed([Fed(token, place, row) for place, token in enumerate(shared) if place >= best.length])
        self.kept[row] = shared
        return Begun(row, len(shared))

    def _free(self, engine: Engine, but: int = -1) -> int:
        """A row for another beginning: an empty one, or that of the one used longest ago."""
        empty = [row for row in range(KEPT) if row not in self.kept]
        row = empty[0] if empty else next(row for row in self.kept if row != but)
        self.kept.pop(row, None)
        engine.cut(row)
        return row


def common(ids: Sequence[list[int]]) -> list[int]:
    """Tokens that all begin with; of each at least one is left to be computed."""
    shared = min(ids, key=len)[:-1]
    for other in ids:
        shared = shared[: alike(shared, other)]
    return shared


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two begin with alike."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
