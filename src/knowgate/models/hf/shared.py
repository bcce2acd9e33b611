"""Answers that grow from prompts whose keys and values are kept once, however many answers each prompt gets.

Attention in two parts: all answers of a prompt ask its keys in one product, each asks its own beside it, and one
softmax goes over both. Nothing of a prompt is copied, neither when an answer begins nor at any step. Knows caches
and the shape (prompts x answers); not which tokens are chosen, or why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

NAME = "knowgate_shared"  # among transformers' attention functions
UNKNOWN = ("softcap", "s_aux", "sliding_window", "position_bias")  # what would change the scores
HAS_WIDE_PRODUCTS = torch.__version__ >= (2, 8)  # torch.bmm(..., out_dtype)
_active: ContextVar[Cache] = ContextVar(NAME)


class Branch(CacheLayerMixin):  # type: ignore[misc]
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


class Branches(Cache):  # type: ignore[misc]
    """The caches of all layers, and which tokens of the prompts are padding (added to their scores; None: none is)."""

    def __init__(self, prompts: Cache, mask: torch.Tensor, answers: int, room: int):
        super().__init__(layers=[Branch(layer.keys, layer.values, answers, room) for layer in prompts.layers])
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


def can_share(model: Any) -> bool:
    """Whether the model's attention is the plain one, over all tokens before, and can be exchanged."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = not getattr(config, "sliding_window", None) and not getattr(config, "attn_logit_softcapping", None)
    return bool(getattr(model, "_supports_attention_backend", False)) and kinds == {"full_attention"} and plain


@contextlib.contextmanager
def sharing(model: Any, branches: Branches) -> Iterator[None]:
    """While the block runs, the model's attention reads these caches. For who has the turn to run the model."""
    config = model.config.get_text_config()
    before, token = config._attn_implementation, _active.set(branches)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _active.reset(token)


def attend(
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
    if odd := [name for name in UNKNOWN if others.get(name) is not None]:
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
    if left.is_cuda and left.dtype != torch.float32 and HAS_WIDE_PRODUCTS:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right).float()


AttentionInterface.register(NAME, attend)


@dataclass
class SharedStream:
    """Answers being generated: `rows` (prompts x answers) are their numbers as they stand in the batch now."""

    model: Any
    branches: Branches
    starts: torch.Tensor  # tokens of each prompt
    rows: torch.Tensor
    fed: int = 0

    def feed(self, tokens: torch.Tensor, layers: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of the next tokens and the states at these ones (prompts x answers x ...)."""
        shape = self.rows.shape
        positions = (self.starts + self.fed)[:, None].expand(shape).reshape(-1, 1)
        with sharing(self.model, self.branches):
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


def branch_off(model: Any, cache: Cache, mask: torch.Tensor, answers: int, room: int) -> SharedStream:
    """`answers` for each prompt of a prefill, of up to `room` tokens that are fed. The prefill stays as it is."""
    numbers = torch.arange(len(mask) * answers, device=mask.device).view(len(mask), answers)
    return SharedStream(model, Branches(cache, mask, answers, max(1, room)), mask.sum(dim=1), numbers)
