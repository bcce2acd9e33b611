"""Rows of tokens being generated from one prefill: feed, choose, split, repeat.

Knows tensors and caches; not prompts, gates or text. The cache holds the keys and values of every token fed so
far, so drafting, sampling and going on later all share the prefill.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from knowgate.errors import ModelError
from knowgate.models.hf.forward_pass import PartialPass, PrefixCache, run_lower_layers
from knowgate.types import Sampling

INITIAL_TOP_P_WIDTH = 256  # tokens among which top_p is looked for first


def draw_tokens(logits: torch.Tensor, uniforms: NDArray[np.float64], sampling: Sampling) -> list[int]:
    """Inverse-CDF sampling: the token at which the cumulative probability passes the uniform number."""
    numbers = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None]
    tokens, are_finite = draw_tokens_on_device(logits, numbers, sampling)
    if not bool(are_finite):
        raise make_nan_error()
    drawn: list[int] = tokens[:, 0].tolist()
    return drawn


def draw_tokens_on_device(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many tokens for each row of logits as it has uniform numbers, and whether all logits were numbers: nobody
    waits for the device to know it."""
    scaled = logits.float() / sampling.temperature
    if sampling.is_whole:
        return _pick(torch.softmax(scaled, dim=-1), uniforms, logits.shape[1] - 1)
    kept, tokens = filter_top_tokens(scaled, sampling)
    places, are_finite = _pick(kept, uniforms, (kept > 0).sum(dim=-1, keepdim=True) - 1)
    return tokens.gather(1, places), are_finite


def make_nan_error() -> ModelError:
    return ModelError("the model gave NaN instead of token probabilities: its weights or number format are bad.")


def filter_top_tokens(scaled: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and tokens, best first; 0 for what top_p cuts off."""
    shares, tokens = _best(scaled, sampling.top_k) if sampling.top_k else _reaching(scaled, sampling.top_p)
    inside = shares.cumsum(dim=-1) - shares < sampling.top_p
    inside[:, 0] = True  # sums are rounded: the best one always stays
    return shares.where(inside | shares.isnan(), 0), tokens


def _best(scaled: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, tokens = scaled.topk(min(k, scaled.shape[1]))
    return torch.softmax(values, dim=-1), tokens


def _reaching(scaled: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As many of the best as reach `share` in every row, tried with a few first: sorting a vocabulary is slow."""
    width, total = INITIAL_TOP_P_WIDTH, scaled.logsumexp(dim=-1, keepdim=True)
    while True:
        values, tokens = scaled.topk(min(width, scaled.shape[1]))
        shares = (values - total).exp()
        if width >= scaled.shape[1] or bool((shares.sum(dim=-1) >= share).all()):
            return shares, tokens
        width *= 8


def _pick(shares: torch.Tensor, uniforms: torch.Tensor, last: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns for each row. last: the last one that may be chosen, as a uniform number may be rounded up to 1."""
    cumulative = shares.cumsum(dim=-1)
    total = cumulative[:, -1:]
    places = torch.searchsorted(cumulative, uniforms * total, right=True)
    return torch.minimum(places, torch.as_tensor(last, device=places.device)), torch.isfinite(total).all()


@dataclass(frozen=True)
class TokenStep:
    """A chosen token with what the distribution looked like."""

    token: int
    logprob: float
    entropy: float
    margin: float


@dataclass
class DecodedRow:
    """One answer as it grows. `finished` once an end token was chosen (which is not kept)."""

    steps: list[TokenStep] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    after: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class DecodingBatch:
    """A batch in the middle of generation. `logits` are those of the next token, or None while `pending` tokens
    have been chosen but not fed yet (feeding is put off: whoever goes on pays for it)."""

    model: Any
    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    pending: torch.Tensor | None = None
    half: PartialPass | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def ready(self, layers: Sequence[int] = ()) -> torch.Tensor:
        """Logits of the next token; feeds the pending tokens if there are any."""
        if self.pending is not None:
            tokens, self.pending = self.pending, None
            self._feed(tokens, layers)
        if self.half is not None:
            self.logits, self.half = self.half.finish(self.model), None
        if self.logits is None:
            raise RuntimeError("a stream has either logits or pending tokens")
        return self.logits

    def _feed(self, tokens: torch.Tensor, layers: Sequence[int]) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        positions = self.mask.sum(dim=1, keepdim=True) - 1
        out = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(layers),
        )
        self.logits = out.logits[:, -1]
        self.hidden = {layer: out.hidden_states[layer][:, -1] for layer in layers}

    def choose(self, tokens: torch.Tensor) -> None:
        self.pending, self.logits = tokens, None

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, in place: the rest of the batch is done."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]
        self.logits = None if self.logits is None else self.logits[index]
        self.pending = None if self.pending is None else self.pending[index]
        self.hidden = {layer: state[index] for layer, state in self.hidden.items()}
        self.half = None if self.half is None else self.half.select(index, self.cache)

    def copy(self, rows: Sequence[int], repeat: int = 1) -> DecodingBatch:
        """A stream of its own for some rows, each `repeat` times; this one stays as it is."""
        index = torch.tensor(rows, device=self.mask.device).repeat_interleave(repeat)
        cache = DynamicCache([(layer.keys[index], layer.values[index]) for layer in self.cache.layers])
        if self.half is not None:  # the upper layers have nothing to copy yet
            missing = len(self.model.base_model.layers) - len(cache.layers)
            cache.layers.extend(DynamicLayer() for _ in range(missing))
        return DecodingBatch(
            self.model,
            cache,
            self.mask[index],
            None if self.logits is None else self.logits[index],
            {layer: state[index] for layer, state in self.hidden.items()},
            None if self.pending is None else self.pending[index],
            None if self.half is None else self.half.select(index, cache),
        )


def prefill(
    model: Any,
    ids: Sequence[Sequence[int]],
    pad: int,
    device: torch.device,
    layers: Sequence[int] = (),
    prefixes: PrefixCache | None = None,
    *,
    states_only: bool = False,
) -> DecodingBatch:
    """Run the prompts, padded on the left of what they do not share, and stop before the first answer token.

    states_only: nobody may ever ask for tokens, so the layers above the highest one wanted are put off.
    """
    done, cache = (prefixes or PrefixCache()).start(model, ids, device)
    tokens, mask = pad_left([row[done:] for row in ids], pad, device)
    mask = torch.cat([mask.new_ones(len(ids), done), mask], dim=1)
    inputs = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)[:, done:],
        "past_key_values": cache,
        "use_cache": True,
    }
    if states_only and layers and max(layers) < len(model.base_model.layers):
        return _half_way(model, cache, mask, layers, inputs)
    out = model(**inputs, logits_to_keep=1, output_hidden_states=bool(layers))
    hidden = {layer: out.hidden_states[layer][:, -1].clone() for layer in layers}
    return DecodingBatch(model, cache, mask, out.logits[:, -1], hidden)


def _half_way(
    model: Any, cache: Any, mask: torch.Tensor, layers: Sequence[int], inputs: dict[str, Any]
) -> DecodingBatch:
    """Stop at the highest layer; lower ones that are wanted are caught on the way."""
    hidden: dict[int, torch.Tensor] = {}

    def catch(layer: int) -> Any:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden[layer] = (args[0] if args else kwargs["hidden_states"])[:, -1].clone()

        return model.base_model.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)

    hooks = [catch(layer) for layer in layers]
    try:
        half = run_lower_layers(model, max(layers), **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return DecodingBatch(model, cache, mask, None, hidden, half=half)


def pad_left(ids: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of equal width and the mask of what is real in them."""
    width = max(map(len, ids))
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in ids], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
    return tokens, mask


def decode_greedily(
    stream: DecodingBatch, rows: list[DecodedRow], max_tokens: int, stop: frozenset[int], layers: Sequence[int] = ()
) -> list[int]:
    """Extend `rows` greedily up to `max_tokens` in all. Gives back which rows the stream still holds.

    With `layers`, each row's `after` gets the states at its last token.
    """
    growing = iter_greedy_steps(stream, rows, max_tokens, stop, layers)
    while True:
        try:
            next(growing)
        except StopIteration as end:
            alive: list[int] = end.value
            return alive


def iter_greedy_steps(
    stream: DecodingBatch, rows: list[DecodedRow], max_tokens: int, stop: frozenset[int], layers: Sequence[int] = ()
) -> Generator[None, None, list[int]]:
    """`draft`, pausing after each token."""
    alive, ends = list(range(len(rows))), FinalStates(len(rows))
    while alive and len(rows[alive[0]].tokens) < max_tokens:
        steps = pick_greedy_steps(stream.ready(layers))
        ends.remember(stream, alive)
        for place, i in enumerate(alive):
            _append(rows[i], steps[place], stop)
        alive = _carry_on(stream, rows, alive, [step.token for step in steps])
        yield
    ends.finish(stream, rows, alive, layers)
    return alive


@dataclass
class FinalStates:
    """The states at the token each row was fed last: if the next one ends the answer, those of its last token.

    One block per layer for all rows: slices row by row cost more than the pass itself once there are thousands.
    """

    n_rows: int
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def remember(self, stream: DecodingBatch, alive: list[int]) -> None:
        if not stream.hidden:
            return
        index = torch.tensor(alive, device=stream.mask.device)
        for layer, state in stream.hidden.items():
            block = self.blocks.setdefault(layer, state.new_zeros(self.n_rows, state.shape[-1]))
            block[index] = state

    def finish(self, stream: DecodingBatch, rows: list[DecodedRow], alive: list[int], layers: Sequence[int]) -> None:
        """Feed what is pending, so that rows cut off by the limit have states too, and hand all of them out."""
        if layers and alive:
            stream.ready(layers)
            self.remember(stream, alive)
        for i, row in enumerate(rows):
            row.after = {layer: block[i] for layer, block in self.blocks.items()}


def _append(row: DecodedRow, step: TokenStep, stop: frozenset[int]) -> None:
    if step.token in stop:
        row.finished = True
    else:
        row.steps.append(step)
        row.tokens.append(step.token)


def _carry_on(stream: DecodingBatch, rows: list[DecodedRow], alive: list[int], tokens: list[int]) -> list[int]:
    """Queue the chosen tokens and leave finished rows behind."""
    stream.choose(torch.tensor(tokens, device=stream.mask.device))
    return _leave_finished(stream, rows, alive)


def _leave_finished(stream: DecodingBatch, rows: list[DecodedRow], alive: list[int]) -> list[int]:
    """Finished rows cost time in every further step; the last ones stay, as a stream is never empty."""
    going = [place for place, i in enumerate(alive) if not rows[i].finished]
    if going and len(going) < len(alive):
        stream.keep(going)
    return [alive[place] for place in going]


def pick_greedy_steps(logits: torch.Tensor) -> list[TokenStep]:
    """The most probable token of each row with its log-probability, entropy (nats) and top-two margin."""
    tokens, first, entropy, margin = compute_step_statistics(logits)
    if not bool(torch.isfinite(first).all()):
        raise make_nan_error()
    columns = (tokens.tolist(), first.tolist(), entropy.tolist(), margin.tolist())
    return [TokenStep(*values) for values in zip(*columns, strict=True)]


def compute_step_statistics(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The values of `Step` for each row, where the logits are."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    top = logp.topk(2, dim=-1)
    entropy = -(logp.exp() * logp).nan_to_num().sum(dim=-1)  # a token forbidden outright has p log p = 0 * -inf
    best, second = top.values.unbind(dim=-1)
    return top.indices[:, 0], best, entropy, best.exp() - second.exp()


def sample_rows(
    stream: DecodingBatch,
    uniforms: NDArray[np.float64],
    sampling: Sampling,
    stop: frozenset[int],
    layers: Sequence[int] = (),
    *,
    past_end: bool = False,
) -> list[DecodedRow]:
    """Draw one answer per row, one uniform number per token.

    Uniforms are (rows x tokens) and come from outside, so an answer depends on its own prompt and seed alone, not
    on what else was in the batch or on the device. With `layers`, each row's `after` gets the states at its last token,
    or, `past_end`, at the token that ended it, which is then fed too; rows cut off by the limit have none.
    """
    rows = [DecodedRow() for _ in range(len(stream))]
    alive, ends = list(range(len(rows))), FinalStates(len(rows))
    for position in range(uniforms.shape[1]):
        stream.ready(layers)
        ends.remember(stream, alive)
        alive = _leave_finished(stream, rows, alive) if past_end else alive
        if not alive:
            break
        tokens = draw_tokens(stream.ready(), uniforms[alive, position], sampling)
        for i, token in zip(alive, tokens, strict=True):
            if token in stop:
                rows[i].finished = True
            else:
                rows[i].tokens.append(token)
        stream.choose(torch.tensor(tokens, device=stream.mask.device))
        alive = alive if past_end else _leave_finished(stream, rows, alive)
        if not alive:
            break
    ends.finish(stream, rows, alive, layers)
    return rows
