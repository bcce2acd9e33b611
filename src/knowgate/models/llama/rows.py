"""Answers that grow side by side in an engine: choose a token for each row, feed them all, until every row has ended.

Plain numpy; knows engines and uniform numbers, not prompts or text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from knowgate.models.llama.engine import Engine, Fed, log_softmax
from knowgate.types import Sampling, Vector


@dataclass(frozen=True)
class Step:
    """A chosen token with what the distribution looked like."""

    token: int
    logprob: float
    entropy: float
    margin: float


@dataclass
class Row:
    """One answer. `length`: tokens of the row that are in the engine; the last of `tokens` may not be there yet.

    uniforms: numbers to draw by; None for the most probable tokens. end: the token that ended it, which is not kept.
    states: by layer, at the token that was fed last.
    """

    place: int
    length: int
    limit: int
    uniforms: NDArray[np.float64] | None = None
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: int | None = None
    states: dict[int, Vector] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def is_over(self) -> bool:
        return self.finished or len(self.tokens) >= self.limit


def grow(
    engine: Engine, rows: Sequence[Row], logits: Vector, sampling: Sampling, layers: Sequence[int] = ()
) -> Iterator[None]:
    """Extend all rows from the logits of their next tokens; pauses after each token.

    The last token of a row is not fed: whoever wants to go on, or its states, pays for it.
    """
    alive = [(row, values) for row, values in zip(rows, logits, strict=True) if not row.is_over]
    while alive:
        choose([row for row, _ in alive], np.stack([values for _, values in alive]), sampling, engine)
        yield
        going = [row for row, _ in alive if not row.is_over]
        if not going:
            return
        alive = list(zip(going, feed_last(engine, going, layers), strict=True))


def feed_last(engine: Engine, rows: Sequence[Row], layers: Sequence[int] = (), *, ends: bool = False) -> Vector:
    """Feed the last token of each row, or the one that ended it; gives the logits that follow."""
    tokens = [row.end if ends and row.end is not None else row.tokens[-1] for row in rows]
    fed = [Fed(token, row.length, row.place, wanted=True) for token, row in zip(tokens, rows, strict=True)]
    logits, states = engine.feed(fed, layers)
    for number, row in enumerate(rows):
        row.length += 1
        row.states = {layer: states[layer][number] for layer in layers}
    return logits


def choose(rows: Sequence[Row], logits: Vector, sampling: Sampling, engine: Engine) -> None:
    """A token for each row: the most probable one with its step, or one drawn by the row's next uniform number."""
    greedy = [number for number, row in enumerate(rows) if row.uniforms is None]
    for number, step in zip(greedy, most_probable(logits[greedy]) if greedy else [], strict=True):
        _take(rows[number], step.token, engine)
        if not rows[number].finished:
            rows[number].steps.append(step)
    drawn = [number for number, row in enumerate(rows) if row.uniforms is not None]
    for number, token in zip(
        drawn, draw([rows[n] for n in drawn], logits[drawn], sampling) if drawn else [], strict=True
    ):
        _take(rows[number], token, engine)


def _take(row: Row, token: int, engine: Engine) -> None:
    if engine.ends(token):
        row.end = token
    else:
        row.tokens.append(token)


def most_probable(logits: Vector) -> list[Step]:
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
    return [Step(*values) for values in zip(*columns, strict=True)]


def draw(rows: Sequence[Row], logits: Vector, sampling: Sampling) -> list[int]:
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
