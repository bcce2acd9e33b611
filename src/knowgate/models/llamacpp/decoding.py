"""Answers that grow side by side in an engine: choose a token for each row, feed them all, until every row has ended.

Plain numpy; knows engines and uniform numbers, not prompts or text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.models.llamacpp.engine import InputToken, LlamaEngine, log_softmax
from knowgate.types import Sampling, Vector


@dataclass(frozen=True)
class TokenStep:
    """A chosen token with what the distribution looked like."""

    token: int
    logprob: float
    entropy: float
    margin: float


@dataclass
class SequenceState:
    """One answer. `length`: tokens of the row that are in the engine; the last of `tokens` may not be there yet.

    uniforms: numbers to draw by; None for the most probable tokens. end: the token that ended it, which is not kept.
    states: by layer, at the token that was fed last.
    """

    place: int
    length: int
    limit: int
    uniforms: NDArray[np.float64] | None = None
    tokens: list[int] = field(default_factory=list)
    steps: list[TokenStep] = field(default_factory=list)
    end: int | None = None
    states: dict[int, Vector] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def is_over(self) -> bool:
        return self.finished or len(self.tokens) >= self.limit


def iter_decoding_steps(
    engine: LlamaEngine, rows: Sequence[SequenceState], logits: Vector, sampling: Sampling, layers: Sequence[int] = ()
) -> Iterator[None]:
    """Extend all rows from the logits of their next tokens; pauses after each token.

    The last token of a row is not fed: whoever wants to go on, or its states, pays for it.
    """
    alive = [(row, values) for row, values in zip(rows, logits, strict=True) if not row.is_over]
    while alive:
        choose_tokens([row for row, _ in alive], np.stack([values for _, values in alive]), sampling, engine)
        yield
        going = [row for row, _ in alive if not row.is_over]
        if not going:
            return
        alive = list(zip(going, feed_last_tokens(engine, going, layers), strict=True))


def feed_last_tokens(
    engine: LlamaEngine, rows: Sequence[SequenceState], layers: Sequence[int] = (), *, ends: bool = False
) -> Vector:
    """Feed the last token of each row, or the one that ended it; gives the logits that follow."""
    tokens = [row.end if ends and row.end is not None else row.tokens[-1] for row in rows]
    fed = [InputToken(token, row.length, row.place, wanted=True) for token, row in zip(tokens, rows, strict=True)]
    logits, states = engine.feed(fed, layers)
    for number, row in enumerate(rows):
        row.length += 1
        row.states = {layer: states[layer][number] for layer in layers}
    return logits


def choose_tokens(rows: Sequence[SequenceState], logits: Vector, sampling: Sampling, engine: LlamaEngine) -> None:
    """A token for each row: the most probable one with its step, or one drawn by the row's next uniform number."""
    greedy = [number for number, row in enumerate(rows) if row.uniforms is None]
    for number, step in zip(greedy, pick_greedy_steps(logits[greedy]) if greedy else [], strict=True):
        _take(rows[number], step.token, engine)
        if not rows[number].finished:
            rows[number].steps.append(step)
    drawn = [number for number, row in enumerate(rows) if row.uniforms is not None]
    for number, token in zip(
        drawn, draw_tokens([rows[n] for n in drawn], logits[drawn], sampling) if drawn else [], strict=True
    ):
        _take(rows[number], token, engine)


def _take(row: SequenceState, token: int, engine: LlamaEngine) -> None:
    if engine.ends(token):
        row.end = token
    else:
        row.tokens.append(token)


def pick_greedy_steps(logits: Vector) -> list[TokenStep]:
    logp = log_softmax(logits)
    p = np.exp(logp)
    entropy = -np.where(p > 0, p * np.where(p > 0, logp, 0), 0).sum(axis=-1)
    best = logp.argmax(axis=-1)
    numbers = np.arange(len(best))
    first = logp[numbers, best]
    p[numbers, best] = -1
    second = p.max(axis=-1)
    margins = np.exp(first) - second
    columns = (best.tolist(), first.tolist(), entropy.tolist(), margins.tolist())
    return [TokenStep(*values) for values in zip(*columns, strict=True)]


def draw_tokens(rows: Sequence[SequenceState], logits: Vector, sampling: Sampling) -> list[int]:
    """Inverse-CDF sampling, as for transformers: the token at which the cumulative probability passes the number."""
    uniforms = [float(row.uniforms[len(row.tokens)]) for row in rows if row.uniforms is not None]
    shares = np.exp(log_softmax((logits / np.float32(sampling.temperature)).astype(np.float32)))
    if sampling.is_whole:
        return [_pick(share, uniform) for share, uniform in zip(shares, uniforms, strict=True)]
    return [_pick_of_best(share, uniform, sampling) for share, uniform in zip(shares, uniforms, strict=True)]


def _pick(share: Vector, uniform: float) -> int:
    cumulative = np.cumsum(share, dtype=np.float32)
    return int(min(np.searchsorted(cumulative, np.float32(uniform) * cumulative[-1], side="right"), len(share) - 1))


def _pick_of_best(share: Vector, uniform: float, sampling: Sampling) -> int:
    order = np.argsort(-share, kind="stable")[: sampling.top_k or None]
    best = share[order] / (share[order].sum() if sampling.top_k else np.float32(1))
    inside = np.cumsum(best) - best < sampling.top_p
    inside[0] = True  # sums are rounded: the best one always stays
    return int(order[min(_pick(best * inside, uniform), int(inside.sum()) - 1)])


PREFIX_ROWS = 4  # rows of beginnings: a few kinds of prompts take turns when questions are asked
MIN_PREFIX_TOKENS = 16  # tokens worth taking over
MAX_PREFIX_TOKENS = 256  # tokens that are kept of a prompt that may not come again: every other row looks through them
MIN_REUSE_SHARE = 0.75  # of what prompts share: a beginning that covers so much will do


class CachedPrefix(NamedTuple):
    """So many tokens of a prompt are in this row already."""

    row: int
    length: int


@dataclass
class EnginePrefixCache:
    """What the first rows hold, the one used last at the end; all other rows are for prompts and answers."""

    kept: dict[int, list[int]] = field(default_factory=dict)
    times_cleared: int = 0  # the engine, when they were put there

    def start(self, engine: LlamaEngine, ids: Sequence[list[int]], *, room: int, most: int) -> int:
        """Begin rows KEPT, KEPT + 1, ... for these prompts; gives how many tokens of each are there already.

        room: cells that prompts and answers may come to; most: tokens that may be there. What those rows held is gone.
        """
        if self.times_cleared != engine.times_cleared or sum(map(len, self.kept.values())) + room > engine.cells:
            self._forget(engine)
        for row in [row for row in engine.filled if row >= PREFIX_ROWS]:
            engine.cut(row)
        begun = self._begun(engine, ids)
        length = min(begun.length, most)
        if length:
            self.kept[begun.row] = self.kept.pop(begun.row)
            for place in range(len(ids)):
                engine.copy(begun.row, PREFIX_ROWS + place, length)
        return length

    def keep(self, engine: LlamaEngine, tokens: list[int], begun: int) -> None:
        """The first prompt was computed: its beginning is kept, unless most of it was there before."""
        if begun < MIN_REUSE_SHARE * (len(tokens) - 1) and len(tokens) > MIN_PREFIX_TOKENS:
            row, tokens = self._free(engine), tokens[:MAX_PREFIX_TOKENS]
            engine.copy(PREFIX_ROWS, row, len(tokens))
            self.kept[row] = tokens

    def _forget(self, engine: LlamaEngine) -> None:
        self.kept.clear()
        engine.clear()
        self.times_cleared = engine.times_cleared

    def _begun(self, engine: LlamaEngine, ids: Sequence[list[int]]) -> CachedPrefix:
        shared = find_common_prefix(ids)
        best = max(
            (CachedPrefix(row, count_common_tokens(tokens, shared)) for row, tokens in self.kept.items()),
            key=lambda begun: begun.length,
            default=CachedPrefix(0, 0),
        )
        if len(ids) > 1 and len(shared) >= MIN_PREFIX_TOKENS and best.length < MIN_REUSE_SHARE * len(shared):
            return self._extend(engine, best, shared)
        return best if best.length >= MIN_PREFIX_TOKENS else CachedPrefix(0, 0)

    def _extend(self, engine: LlamaEngine, best: CachedPrefix, shared: list[int]) -> CachedPrefix:
        """Compute what several prompts share, as far as it is not there."""
        row = self._free(engine, but=best.row)
        if best.length:
            engine.copy(best.row, row, best.length)
        engine.feed([InputToken(token, place, row) for place, token in enumerate(shared) if place >= best.length])
        self.kept[row] = shared
        return CachedPrefix(row, len(shared))

    def _free(self, engine: LlamaEngine, but: int = -1) -> int:
        """A row for another beginning: an empty one, or that of the one used longest ago."""
        empty = [row for row in range(PREFIX_ROWS) if row not in self.kept]
        row = empty[0] if empty else next(row for row in self.kept if row != but)
        self.kept.pop(row, None)
        engine.cut(row)
        return row


def find_common_prefix(ids: Sequence[list[int]]) -> list[int]:
    """Tokens that all begin with; of each at least one is left to be computed."""
    shared = min(ids, key=len)[:-1]
    for other in ids:
        shared = shared[: count_common_tokens(shared, other)]
    return shared


def count_common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two begin with alike."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
