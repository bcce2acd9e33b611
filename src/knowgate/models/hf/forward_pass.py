"""Beginnings of prompts that are shared: run once, reused by every prompt that starts alike.

Most prompts of a run begin with the same system turn and instruction; only the question at the end differs. Their
keys and values are kept, so that a batch pays for the shared part once. Results are the same up to rounding.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_PREFIX_TOKENS = 16  # tokens worth sharing
PREFIX_CACHE_SIZE = 8
LayerCaches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class PrefixCache:
    """A small store of the beginnings used last."""

    kept: OrderedDict[tuple[int, ...], LayerCaches] = field(default_factory=OrderedDict)

    def start(
        self, model: Any, ids: Sequence[Sequence[int]], device: torch.device, worth_keeping: int = 0
    ) -> tuple[int, DynamicCache]:
        """How many tokens are already dealt with, and a cache that holds them for each of the rows.

        The first `worth_keeping` tokens are known to come again: they are kept even if only one row has them now.
        """
        shared = find_common_prefix(ids)
        prefix = self._find(shared, len(ids))
        if MIN_PREFIX_TOKENS <= worth_keeping <= len(shared) and len(prefix) < worth_keeping:
            prefix = shared[:worth_keeping]
        if not prefix:
            return 0, DynamicCache()
        if prefix not in self.kept:
            self.kept[prefix] = _run(model, prefix, device)
        self.kept.move_to_end(prefix)
        while len(self.kept) > PREFIX_CACHE_SIZE:
            self.kept.popitem(last=False)
        rows = len(ids)
        expanded = [(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in self.kept[prefix]]
        return len(prefix), DynamicCache(expanded)

    def _find(self, shared: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """A kept beginning if it covers most of what is shared; else what is shared, if several rows gain by it."""
        known = [key for key in self.kept if shared[: len(key)] == key]
        longest = max(known, key=len, default=())
        if len(longest) >= 0.75 * len(shared) or rows == 1:
            return longest
        return shared if len(shared) >= MIN_PREFIX_TOKENS else longest


def find_common_prefix(ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens all rows begin with, short of any row's last token: its logits are still to be computed."""
    length = min(len(row) for row in ids) - 1
    first = ids[0]
    for place in range(length):
        if any(row[place] != first[place] for row in ids):
            return tuple(first[:place])
    return tuple(first[:length])


def _run(model: Any, prefix: Sequence[int], device: torch.device) -> LayerCaches:
    cache = DynamicCache()
    model(
        input_ids=torch.tensor([list(prefix)], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return [(layer.keys, layer.values) for layer in cache.layers]


class _Stopped(Exception):
    """Thrown from inside the model, below the layer that is not wanted."""


@dataclass(frozen=True)
class PartialPass:
    """States that are the input of `layer`, and the other arguments the layers are called with."""

    layer: int
    states: torch.Tensor
    arguments: Mapping[str, Any]

    def select(self, rows: torch.Tensor, cache: Any) -> PartialPass:
        """Some rows, going on in a cache of their own."""
        size = self.states.shape[0]
        arguments = {key: _rows(value, rows, size) for key, value in self.arguments.items()}
        return PartialPass(self.layer, self.states[rows], {**arguments, "past_key_values": cache})

    def finish(self, model: Any) -> torch.Tensor:
        """Run the upper layers; gives the logits of the next token."""
        states = self.states
        for layer in model.base_model.layers[self.layer :]:
            out = layer(states, **self.arguments)
            states = out[0] if isinstance(out, tuple) else out
        logits: torch.Tensor = model.get_output_embeddings()(model.base_model.norm(states[:, -1:]))[:, -1]
        return logits


def supports_partial_pass(model: Any) -> bool:
    """Whether the model is built as this file assumes; others run the whole pass."""
    base, config = model.base_model, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = not getattr(config, "final_logit_softcapping", None) and not getattr(config, "logit_scale", None)
    return hasattr(base, "layers") and hasattr(base, "norm") and kinds == {"full_attention"} and plain


def run_lower_layers(model: Any, layer: int, **inputs: Any) -> PartialPass:
    """The pass up to, and without, `layer`."""
    caught: dict[str, Any] = {}

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(states=args[0] if args else kwargs["hidden_states"], kwargs=kwargs)
        raise _Stopped

    hook = model.base_model.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.base_model(**inputs)
    except _Stopped:
        pass
    finally:
        hook.remove()
    arguments = {key: value for key, value in caught["kwargs"].items() if key != "hidden_states"}
    return PartialPass(layer, caught["states"], arguments)


def _rows(value: Any, rows: torch.Tensor, size: int) -> Any:
    """The chosen rows of whatever has one row per prompt."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == size:
        return value[rows]
    if isinstance(value, tuple):
        return tuple(_rows(item, rows, size) for item in value)
    return value


ATTENTION_NAME = "knowgate_shared"  # among transformers' attention functions
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sliding_window", "position_bias")  # what would change the scores
HAS_BMM_OUT_DTYPE = torch.__version__ >= (2, 8)  # torch.bmm(..., out_dtype)
_active: ContextVar[Cache] = ContextVar(ATTENTION_NAME)


class SharedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values: the prompts' (prompts x heads x tokens x width), which are only read, and the
    answers' own (prompts x heads x answers x tokens x width), with room for all tokens that may come."""

    is_sliding = False

    def __init__(self, prompt_keys: torch.Tensor, prompt_values: torch.Tensor, answers: int, room: int):
        super().__init__()
        prompts, heads, _, width = prompt_keys.shape
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self.keys = prompt_keys.new_empty(prompts, heads, answers, room, width)
        self.values = prompt_values.new_empty(prompts, heads, answers, room, prompt_values.shape[-1])
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for own, fresh in ((self.keys, key_states), (self.values, value_states)):
            own[:, :, :, self.length] = fresh.view(own.shape[0], own.shape[2], own.shape[1], -1).transpose(1, 2)
        self.length += 1
        return self.keys[:, :, :, : self.length], self.values[:, :, :, : self.length]

    def select(self, prompts: torch.Tensor | None, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Keep the answers at (rows, columns), one row for each prompt that stays; prompts None: all of them stay."""
        self.keys = _selected(self.keys, rows, columns, self.length)
        self.values = _selected(self.values, rows, columns, self.length)
        if prompts is not None:
            self.prompt_keys, self.prompt_values = self.prompt_keys[prompts], self.prompt_values[prompts]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Everything is there from the beginning."""

    def get_seq_length(self) -> int:
        return int(self.prompt_keys.shape[2]) + self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return int(self.prompt_keys.shape[2] + self.keys.shape[3])

    get_max_cache_shape = get_max_length  # its name in transformers 5.0


def _selected(own: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, length: int) -> torch.Tensor:
    kept = own.transpose(1, 2)[rows, columns, :, :length].transpose(1, 2)
    fresh = own.new_empty(*kept.shape[:3], *own.shape[3:])
    fresh[:, :, :, :length] = kept
    return fresh


class SharedCache(Cache):  # type: ignore[misc]
    """The caches of all layers, and which tokens of the prompts are padding (added to their scores; None: none is)."""

    def __init__(self, prompts: Cache, mask: torch.Tensor, answers: int, room: int):
        super().__init__(layers=[SharedCacheLayer(layer.keys, layer.values, answers, room) for layer in prompts.layers])
        self.padding = _padding(mask)

    def select(self, prompts: torch.Tensor | None, rows: torch.Tensor, columns: torch.Tensor) -> None:
        for layer in self.layers:
            layer.select(prompts, rows, columns)
        if prompts is not None and self.padding is not None:
            self.padding = self.padding[prompts]


def _padding(mask: torch.Tensor) -> torch.Tensor | None:
    if bool(mask.all()):
        return None
    return mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(mask == 0, float("-inf"))[:, None, None]


def supports_shared_cache(model: Any) -> bool:
    """Whether the model's attention is the plain one, over all tokens before, and can be exchanged."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = not getattr(config, "sliding_window", None) and not getattr(config, "attn_logit_softcapping", None)
    return bool(getattr(model, "_supports_attention_backend", False)) and kinds == {"full_attention"} and plain


@contextlib.contextmanager
def use_shared_attention(model: Any, branches: SharedCache) -> Iterator[None]:
    """While the block runs, the model's attention reads these caches. For who has the turn to run the model."""
    config = model.config.get_text_config()
    before, token = config._attn_implementation, _active.set(branches)
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _active.reset(token)


def compute_shared_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One new token for each answer. key, value: what `Branch.update` gave; the prompts' are in the active caches."""
    if odd := [name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None]:
        raise RuntimeError(f"attention with {', '.join(odd)} cannot be shared: see can_share")
    branches = _active.get()
    layer = branches.layers[module.layer_idx]
    prompts, heads, answers, length, _ = key.shape
    groups = query.shape[1] // heads
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = (query * scale).view(prompts, answers, heads, groups, -1).transpose(1, 2)  # ... x heads x answers x groups
    asked = asked.reshape(prompts * heads, answers * groups, -1)
    shared = _product(asked, layer.prompt_keys.flatten(0, 1).transpose(1, 2))
    shared = shared.view(prompts, heads, answers * groups, -1)
    if branches.padding is not None:
        shared += branches.padding
    own = _product(asked.view(prompts * heads * answers, groups, -1), key.flatten(0, 2).transpose(1, 2))
    scores = torch.cat([shared, own.view(prompts, heads, answers * groups, length)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    over_prompt, over_own = weights.split([shared.shape[-1], length], dim=-1)
    read = torch.bmm(over_prompt.flatten(0, 1), layer.prompt_values.flatten(0, 1))
    told = torch.bmm(over_own.reshape(prompts * heads * answers, groups, length), value.flatten(0, 2))
    out = (read + told.view_as(read)).view(prompts, heads, answers, groups, -1).transpose(1, 2)
    return out.reshape(prompts * answers, 1, heads * groups, -1), None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Scores are kept in single precision, as attention kernels do; on a CPU the product cannot say so."""
    if left.is_cuda and left.dtype != torch.float32 and HAS_BMM_OUT_DTYPE:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right).float()


AttentionInterface.register(ATTENTION_NAME, compute_shared_attention)


@dataclass
class SharedDecodingBatch:
    """Answers being generated: `rows` (prompts x answers) are their numbers as they stand in the batch now."""

    model: Any
    branches: SharedCache
    starts: torch.Tensor  # tokens of each prompt
    rows: torch.Tensor
    fed: int = 0

    def feed(self, tokens: torch.Tensor, layers: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of the next tokens and the states at these ones (prompts x answers x ...)."""
        shape = self.rows.shape
        positions = (self.starts + self.fed)[:, None].expand(shape).reshape(-1, 1)
        with use_shared_attention(self.model, self.branches):
            out = self.model(
                input_ids=tokens.reshape(-1, 1),
                position_ids=positions,
                past_key_values=self.branches,
                use_cache=True,
                output_hidden_states=bool(layers),
            )
        self.fed += 1
        hidden = {layer: out.hidden_states[layer][:, -1].view(*shape, -1) for layer in layers}
        return out.logits[:, -1].view(*shape, -1), hidden

    def select(self, prompts: torch.Tensor | None, rows: torch.Tensor, columns: torch.Tensor) -> None:
        self.branches.select(prompts, rows, columns)
        self.rows = self.rows[rows, columns]
        self.starts = self.starts if prompts is None else self.starts[prompts]


def start_shared_decoding(model: Any, cache: Cache, mask: torch.Tensor, answers: int, room: int) -> SharedDecodingBatch:
    """`answers` for each prompt of a prefill, of up to `room` tokens that are fed. The prefill stays as it is."""
    numbers = torch.arange(len(mask) * answers, device=mask.device).view(len(mask), answers)
    return SharedDecodingBatch(model, SharedCache(cache, mask, answers, max(1, room)), mask.sum(dim=1), numbers)
