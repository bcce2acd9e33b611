"""Forward passes that avoid repeated work: cached prefixes, lower layers only, and answers that share a prompt.

- `PrefixCache` keeps the keys and values of prompt beginnings that many prompts share.
- `PartialPass` stops below a layer. A gate that reads a middle layer needs no more, and a question that is answered
  closed-book continues from there.
- `SharedCache` lets many answers per prompt use one copy of the prompt's keys and values.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from knowgate.models.tokenization import find_common_prefix

MIN_PREFIX_TOKENS = 16
PREFIX_CACHE_SIZE = 8
MAX_PREFIX_TOKENS = 1_024  # of each; clients choose the beginnings of their questions, and a token takes 50 KB or more
MIN_PREFIX_COVERAGE = 0.75  # of the shared tokens: a cached prefix this long is used as it is
LayerCaches = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer
ATTENTION_NAME = "knowgate_shared"  # registered with transformers
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sliding_window", "position_bias")
HAS_BMM_OUT_DTYPE = torch.__version__ >= (2, 8)
_active_cache: ContextVar[Cache] = ContextVar(ATTENTION_NAME)


@dataclass
class PrefixCache:
    """Cache of the attention keys and values of recent prompt prefixes.

    Many prompts begin with the same instruction. The model reads it only once.
    """

    entries: OrderedDict[tuple[int, ...], LayerCaches] = field(default_factory=OrderedDict)

    def start(
        self, model: Any, ids: Sequence[Sequence[int]], device: torch.device, n_reusable: int = 0
    ) -> tuple[int, DynamicCache]:
        """Return the keys and values of a prefix shared by all prompts.

        The forward pass can start after the prefix.

        Args:
            model: The transformers model.
            ids: Token ids of each prompt.
            device: The device that the model runs on.
            n_reusable: Number of tokens at the start with which later prompts will begin, too. They are cached even if
                there is only one prompt now.

        Returns:
            The number of tokens of the prefix, and its keys and values, repeated for each prompt.
        """
        shared = tuple(find_common_prefix(ids))[:MAX_PREFIX_TOKENS]
        prefix = self._choose_prefix(shared, len(ids))
        if len(prefix) < n_reusable and MIN_PREFIX_TOKENS <= n_reusable <= len(shared):
            prefix = shared[:n_reusable]
        if not prefix:
            return 0, DynamicCache()
        # `expand` repeats the prefix for every prompt without copying memory.
        shape = (len(ids), -1, -1, -1)
        layers = self._get_layers(model, prefix, device)
        expanded = [(keys.expand(shape), values.expand(shape)) for keys, values in layers]
        return len(prefix), DynamicCache(expanded)

    def _get_layers(self, model: Any, prefix: tuple[int, ...], device: torch.device) -> LayerCaches:
        """Return the keys and values of a prefix, computing them if they are not cached."""
        if prefix not in self.entries:
            cache = DynamicCache()
            ids = torch.tensor([prefix], device=device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self.entries[prefix] = [(layer.keys, layer.values) for layer in cache.layers]
        self.entries.move_to_end(prefix)
        if len(self.entries) > PREFIX_CACHE_SIZE:
            self.entries.popitem(last=False)  # the one that was not used for the longest time
        return self.entries[prefix]

    def _choose_prefix(self, shared: tuple[int, ...], n_prompts: int) -> tuple[int, ...]:
        """Choose the prefix for `n_prompts` prompts that begin with the tokens `shared`: a cached prefix or `shared`."""
        cached = [prefix for prefix in self.entries if shared[: len(prefix)] == prefix]
        longest = max(cached, key=len, default=())
        covers_most = len(longest) >= MIN_PREFIX_COVERAGE * len(shared)
        if covers_most or n_prompts == 1 or len(shared) < MIN_PREFIX_TOKENS:
            return longest
        return shared


class _StopForward(Exception):
    """Raised inside the model to end a pass below a layer. Its argument is the `PartialPass`."""


@dataclass(frozen=True)
class PartialPass:
    """A forward pass through the lower layers of a model. It can be finished later.

    Args:
        layer: Index of the first layer that was not run.
        states: Hidden states that are the input of this layer.
        arguments: The other arguments that the model calls its layers with.
    """

    layer: int
    states: torch.Tensor
    arguments: Mapping[str, Any]

    def select(self, rows: torch.Tensor, cache: Any) -> PartialPass:
        """Return a copy of this pass that continues only some rows of the batch.

        Args:
            rows: Indices of the rows to keep.
            cache: Keys and values of these rows.
        """
        size = self.states.shape[0]
        arguments = {key: _select_rows(value, rows, size) for key, value in self.arguments.items()}
        return PartialPass(self.layer, self.states[rows], {**arguments, "past_key_values": cache})

    def finish(self, model: Any) -> torch.Tensor:
        """Run the remaining layers and return the logits of the next token."""
        states = self.states
        for layer in model.base_model.layers[self.layer :]:
            output = layer(states, **self.arguments)
            states = output[0] if isinstance(output, tuple) else output
        last_states = model.base_model.norm(states[:, -1:])
        output_layer = model.get_output_embeddings()
        logits: torch.Tensor = output_layer(last_states)[:, -1]
        return logits


def supports_partial_pass(model: Any) -> bool:
    """Return whether `PartialPass` can run the model's layers one by one and compute the logits from the last one.

    Plain decoders such as Llama, Qwen and Mistral support this. Models that change the logits at the end do not.
    """
    base = model.base_model
    config = model.config.get_text_config()
    has_layers = hasattr(base, "layers") and hasattr(base, "norm")
    changes_logits = bool(getattr(config, "final_logit_softcapping", None) or getattr(config, "logit_scale", None))
    return has_layers and _has_full_attention(config) and not changes_logits


def _has_full_attention(config: Any) -> bool:
    """Return whether every layer attends to all earlier tokens."""
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


def run_lower_layers(
    model: Any, layers: Sequence[int], inputs: Mapping[str, Any]
) -> tuple[PartialPass, dict[int, torch.Tensor]]:
    """Run a forward pass up to the highest of the given layers.

    A hook before each layer stores the input of the layer. The last hook stops the pass.

    Args:
        model: The transformers model.
        layers: Numbers of the hidden states.
        inputs: Arguments of the forward pass.

    Returns:
        The unfinished pass, and the hidden states at the last token of each prompt, by layer.
    """
    hidden: dict[int, torch.Tensor] = {}

    def store_input(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Store the input of a layer at the last token. The highest layer stops the pass."""
        # Another call can run while this one is paused. It passes no `kwargs` if it was paused when this hook was removed.
        if kwargs is None or kwargs["past_key_values"] is not inputs["past_key_values"]:
            return
        states = args[0] if args else kwargs["hidden_states"]
        hidden[layer] = states[:, -1].clone()
        if layer == max(layers):
            arguments = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            raise _StopForward(PartialPass(layer, states, arguments))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            module = model.base_model.layers[layer]
            hook = module.register_forward_pre_hook(functools.partial(store_input, layer), with_kwargs=True)
            hooks.enter_context(hook)  # removed at the end of the block
        try:
            model.base_model(**inputs)
        except _StopForward as stop:
            return stop.args[0], hidden
    raise RuntimeError(f"the forward pass did not reach layer {max(layers)}")


@contextlib.contextmanager
def capture_last_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yield a dictionary that gets the hidden states at the last token of each prompt when the model runs in the body.

    The option `output_hidden_states` of transformers keeps the states of all layers and tokens instead: of 8,000 tokens
    of the embedded LLM, 1 GB.

    Args:
        model: A transformers model for which `supports_partial_pass` is True.
        layers: Numbers of the hidden states.
    """
    hidden: dict[int, torch.Tensor] = {}
    thread = threading.get_ident()  # other threads can use the model while this one is paused

    def store_input(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread passes no `kwargs` if it was paused when this hook was removed.
        if threading.get_ident() == thread and kwargs is not None:
            states = args[0] if args else kwargs["hidden_states"]
            hidden[layer] = states[:, -1].clone()

    def store_output(layer: int, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if threading.get_ident() == thread:
            hidden[layer] = output[:, -1].clone()

    base = model.base_model
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            if layer < len(base.layers):
                store_layer = functools.partial(store_input, layer)
                hook = base.layers[layer].register_forward_pre_hook(store_layer, with_kwargs=True)
            else:  # the last states come after the norm
                hook = base.norm.register_forward_hook(functools.partial(store_output, layer))
            hooks.enter_context(hook)  # removed at the end of the block
        yield hidden


def _select_rows(value: Any, rows: torch.Tensor, size: int) -> Any:
    """Select rows from a layer argument with one row per prompt.

    Other arguments are returned unchanged.

    Args:
        value: A tensor, a tuple of tensors, or anything else.
        rows: Indices of the rows to select.
        size: Number of prompts.
    """
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == size:
        return value[rows]
    if isinstance(value, tuple):
        return tuple(_select_rows(item, rows, size) for item in value)
    return value


class SharedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Key-value cache of one layer. All answers share the keys and values of their prompt.

    `keys` and `values` hold only the answer tokens (prompts x heads x answers x tokens x width).

    Args:
        prompt_keys: Keys of the prompts, read only (prompts x heads x tokens x width).
        prompt_values: Values of the prompts.
        shape: Number of answers per prompt, and maximum number of tokens per answer.
        position: A tensor with the index of the answer token that the model reads now. All layers share it.
    """

    is_sliding = False

    def __init__(self, prompt_keys: torch.Tensor, prompt_values: torch.Tensor, shape: Sequence[int], position: Any):
        super().__init__()
        self.prompt_keys = prompt_keys
        self.prompt_values = prompt_values
        self.position = position
        # Zeros, because tokens that do not exist yet are read with weight 0.
        self.keys = prompt_keys.new_zeros(*prompt_keys.shape[:2], *shape, prompt_keys.shape[-1])
        self.values = prompt_values.new_zeros(*prompt_values.shape[:2], *shape, prompt_values.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of one new token per answer, and return all stored ones."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            prompts, heads, answers = buffer.shape[:3]
            # `states` has the shape (prompts * answers) x heads x 1 x width. This makes it prompts x heads x answers x 1
            # x width, like one token of the buffer.
            reordered = states.view(prompts, answers, heads, 1, -1).transpose(1, 2)
            buffer.index_copy_(dim=3, index=self.position, source=reordered)
        return self.keys, self.values

    def select(self, prompts: torch.Tensor, answers: torch.Tensor, *, has_all_prompts: bool) -> None:
        """Keep only some prompts and answers in the cache.

        Args:
            prompts: Indices of the prompts to keep (kept prompts x 1).
            answers: For each prompt to keep, the indices of its answers to keep (kept prompts x kept answers).
            has_all_prompts: Whether all prompts are kept, in order, so that their keys and values need not be copied.
        """

        def select_answers(buffer: torch.Tensor) -> torch.Tensor:
            """Keep the chosen answers in a tensor of the shape prompts x heads x answers x tokens x width."""
            # The axes prompts and answers must be next to each other, so that two indices select answers.
            answers_first = buffer.transpose(1, 2)
            return answers_first[prompts, answers].transpose(1, 2).contiguous()

        self.keys = select_answers(self.keys)
        self.values = select_answers(self.values)
        if not has_all_prompts:
            self.prompt_keys = self.prompt_keys[prompts.flatten()]
            self.prompt_values = self.prompt_values[prompts.flatten()]

    def lazy_initialization(self, *args: Any) -> None:
        """Do nothing: the buffers exist from the start."""

    def get_max_length(self) -> int:
        """Return the number of tokens in the prompt and in the longest answer."""
        return int(self.prompt_keys.shape[2] + self.keys.shape[3])

    get_seq_length = get_max_cache_shape = get_max_length  # the second is its name in transformers 5.0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query sees, and the index of the first one."""
        return self.get_max_length(), 0


class SharedCache(Cache):  # type: ignore[misc]
    """Key-value cache of all layers. All answers share the keys and values of their prompt.

    Tensors keep their size, so a CUDA graph can use them. The tensor `score_offsets` is added to attention scores: 0 for
    positions that may be read, -inf for padding and for tokens that do not exist yet.

    Args:
        prompt_cache: Keys and values of the prompts.
        mask: Attention mask of the prompts, 0 for padding and 1 for tokens (prompts x tokens).
        answers: Number of answers per prompt.
        max_tokens: Maximum number of tokens per answer.
    """

    def __init__(self, prompt_cache: Cache, mask: torch.Tensor, answers: int, max_tokens: int):
        self.position = torch.full((1,), -1, device=mask.device)  # of the current token; `start_token` moves it to 0
        layers = [
            SharedCacheLayer(layer.keys, layer.values, (answers, max_tokens), self.position)
            for layer in prompt_cache.layers
        ]
        super().__init__(layers=layers)
        is_visible = torch.nn.functional.pad(mask.bool(), (0, max_tokens), value=False)
        self.score_offsets = torch.where(is_visible, 0.0, -torch.inf)[:, None, None]  # prompts x 1 x 1 x tokens
        self.prompt_width = mask.shape[1]
        self.max_tokens = max_tokens

    def start_token(self) -> None:
        """Move on to the next token of every answer, and let attention see its position."""
        self.position += 1
        self.score_offsets.index_fill_(3, self.position + self.prompt_width, 0.0)

    def select(self, prompts: torch.Tensor, answers: torch.Tensor, *, has_all_prompts: bool) -> None:
        """Keep only some prompts and answers in the cache.

        Args:
            prompts: Indices of the prompts to keep, as a column (kept prompts x 1), so that `tensor[prompts, answers]`
                selects answers. A prompt may occur several times, each time with other answers.
            answers: For each prompt to keep, the indices of its answers to keep (kept prompts x kept answers).
            has_all_prompts: Whether all prompts are kept, in order, so that their keys and values need not be copied.
        """
        for layer in self.layers:
            layer.select(prompts, answers, has_all_prompts=has_all_prompts)
        if not has_all_prompts:
            self.score_offsets = self.score_offsets[prompts.flatten()]


def supports_shared_cache(model: Any) -> bool:
    """Return whether the model can use `SharedCache`.

    This requires plain attention over all earlier tokens.
    """
    config = model.config.get_text_config()
    has_backend = bool(getattr(model, "_supports_attention_backend", False))  # its attention function can be replaced
    is_special = bool(getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None))
    return has_backend and _has_full_attention(config) and not is_special


@contextlib.contextmanager
def use_shared_attention(model: Any, cache: SharedCache) -> Iterator[None]:
    """Make the model use a shared cache while the block runs.

    The caller must hold the model's lock.
    """
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    token = _active_cache.set(cache)
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = implementation
        _active_cache.reset(token)


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
    """Compute attention from each new token to its prompt and answer.

    One matrix product per prompt serves all its answers.

    Args:
        module: The attention layer of the model.
        query: Queries of the new tokens, one row per answer.
        key: Keys of the answers, from `SharedCacheLayer.update`. The keys of the prompts are in the active cache.
        value: Values of the answers.
        attention_mask: Not used; the cache knows which tokens are padding.
        scaling: Factor for the scores; by default one over the square root of the head's width.
        dropout: Not used.
        others: Arguments of variants of attention. Those that cannot be computed here raise RuntimeError.
    """
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None]:
        raise RuntimeError(f"attention with {', '.join(unsupported)} cannot use a cache that several answers share")
    cache = _active_cache.get()
    layer = cache.layers[module.layer_idx]
    prompts, heads, answers, answer_tokens, _ = key.shape
    groups = query.shape[1] // heads  # number of query heads that share a key head
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # All matrix products below are batched: one matrix per key head of each prompt, or per key head of each answer.
    by_prompt = (prompts * heads, answers * groups, -1)
    by_answer = (prompts * heads * answers, groups, -1)
    queries = (query * scale).view(prompts, answers, heads, groups, -1).transpose(1, 2).reshape(by_prompt)
    prompt_scores = _multiply(queries, layer.prompt_keys.flatten(0, 1).transpose(1, 2))
    answer_scores = _multiply(queries.view(by_answer), key.flatten(0, 2).transpose(1, 2))
    scores = torch.cat([prompt_scores, answer_scores.view(by_prompt)], dim=-1)
    scores = scores.view(prompts, heads, answers * groups, -1)
    scores += cache.score_offsets  # hides padding, and tokens that the answers do not have yet
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype).flatten(0, 1)
    prompt_weights, answer_weights = weights.split([prompt_scores.shape[-1], answer_tokens], dim=-1)
    from_prompt = torch.bmm(prompt_weights, layer.prompt_values.flatten(0, 1))
    from_answer = torch.bmm(answer_weights.reshape(by_answer), value.flatten(0, 2))
    output = from_prompt + from_answer.view(by_prompt)
    output = output.view(prompts, heads, answers, groups, -1).transpose(1, 2)
    return output.reshape(prompts * answers, 1, heads * groups, -1), None


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply batches of matrices with a float32 result, as attention kernels do."""
    if left.is_cuda and left.dtype != torch.float32 and HAS_BMM_OUT_DTYPE:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right).float()


AttentionInterface.register(ATTENTION_NAME, compute_shared_attention)
