"""A transformers model that runs in this process: weights, tokenizer, and log-probabilities of given tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from knowgate.models import tokenization
from knowgate.models.hf import batching, loader
from knowgate.models.hf.batching import BatchLimits, BatchWork
from knowgate.models.hf.forward_pass import PrefixCache, supports_partial_pass, supports_shared_cache
from knowgate.models.hf.loader import LoadedModel, LoraAdapters, load_transformers
from knowgate.types import Result, Vector

FIRST_BATCH_SIZES = {"cuda": 512}  # questions that a GPU answers in about the time of a single one
DEFAULT_FIRST_BATCH_SIZE = 4
LONG_PROMPT_TOKENS, PIECE_TOKENS = 2_048, 512


@dataclass(frozen=True)
class LocalModel:
    """Weights and tokenizer of a transformers model, loaded on first use.

    Args:
        source: Hub name or folder.
        label: Name of the model; `hf:SOURCE` by default.
        bits: Quantize the weights to 4 or 8 bits (CUDA, bitsandbytes); 0 for no quantization.

    Attributes:
        prefix_cache: Keys and values of shared prompt prefixes.
    """

    source: str
    label: str = ""
    bits: int = 0
    prefix_cache: PrefixCache = field(default_factory=PrefixCache, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The spec of the model."""
        return self.label or f"hf:{self.source}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash that identifies the weights. Fitted gates store it, because they are valid only for these weights."""
        return loader.compute_fingerprint(self.source, lambda: self.config)

    @functools.cached_property
    def config(self) -> Any:
        """The transformers configuration; reading it does not load the weights."""
        return self.loaded.model.config if "loaded" in vars(self) else loader.load_transformers_config(self.source)

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The model with its weights, and its tokenizer; loaded at the first use."""
        return load_transformers(self.source, self.bits)

    @property
    def encodes_in_threads(self) -> bool:
        """Whether one thread may encode prompts (as `fits` does) while another generates: after the model is loaded."""
        return "loaded" in vars(self)  # the cached property `loaded` was computed

    @property
    def is_interruptible(self) -> bool:
        """Whether a call may pause between two layers or tokens, so that another one can run. Only on a CPU."""
        return "loaded" in vars(self) and self.loaded.device.type == "cpu"

    @contextmanager
    def pause_inference(self) -> Iterator[None]:
        """Release the model's lock in the `with` body, so that other threads can use the model meanwhile."""
        lock = self.adapters.lock
        depth = 0  # how often this thread has acquired the re-entrant lock
        with suppress(RuntimeError):  # raised if the thread no longer holds the lock
            while True:
                lock.release()
                depth += 1
        try:
            yield
        finally:
            for _ in range(depth):
                lock.acquire()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @functools.cached_property
    def adapters(self) -> LoraAdapters:
        """LoRA adapters in these weights, and the lock for running the model."""
        return LoraAdapters(self.loaded.model)

    @functools.cached_property
    def shares_prompt_cache(self) -> bool:
        """Whether all answers to a prompt can use one copy of its keys and values."""
        return supports_shared_cache(self.loaded.model)

    @property
    def first_batch_size(self) -> int:
        """Number of questions to label in the first batch, before the speed of the model is known."""
        return FIRST_BATCH_SIZES.get(self.loaded.device.type, DEFAULT_FIRST_BATCH_SIZE)

    def share_weights(self) -> Self:
        """Return a second model with the same weights, for another LoRA adapter."""
        other = replace(self)
        # `loaded` and `adapters` are cached properties: setting them keeps the copy from loading the weights again.
        vars(other).update(loaded=self.loaded, adapters=self.adapters)
        return other

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the model's generation settings and its tokenizer."""
        generation_config = getattr(self.loaded.model, "generation_config", None)
        ids: set[int] = set()
        for eos in (getattr(generation_config, "eos_token_id", None), self.tokenizer.eos_token_id):
            if eos is not None:
                ids.update(eos if isinstance(eos, list) else [eos])
        return frozenset(ids)

    @property
    def pad_id(self) -> int:
        """Token used for padding."""
        return int(self.tokenizer.pad_token_id or 0)

    @functools.cached_property
    def context_window(self) -> int:
        """Number of tokens that the model can read at once."""
        return int(getattr(self.loaded.model.config.get_text_config(), "max_position_embeddings", 1 << 20))

    @property
    def depth(self) -> int:
        """Number of hidden states: the embeddings and each layer's output."""
        return int(self.config.get_text_config().num_hidden_layers) + 1

    def compute_limits(self) -> BatchLimits:
        """Return the largest batch that fits the memory that is free now."""
        return batching.compute_batch_limits(self.loaded.model, self.loaded.device, shared=self.shares_prompt_cache)

    def run_batched(
        self, ids: list[list[int]], work: BatchWork[Result], rows: int = 1, limits: BatchLimits | None = None
    ) -> list[Result]:
        """Run `work` on batches of prompts that fit the memory, holding the model's lock.

        Args:
            ids: Token ids of each prompt.
            work: Function from the indices of a batch's prompts to their results.
            rows: Number of answers generated per prompt.
            limits: Maximum size of a batch; by default what fits one forward pass.
        """
        with self.adapters.lock:
            return batching.run_in_batches(ids, limits or self.compute_limits(), work, rows, self.loaded.device)

    def make_inputs(
        self, ids: Sequence[list[int]], beginnings: Sequence[list[int]] | None = None, n_reusable: int = 0
    ) -> dict[str, Any]:
        """Return the arguments of a forward pass over prompts, after their cached prefix.

        Args:
            ids: Token ids of each whole prompt.
            beginnings: The beginning of each prompt from which the cached prefix may be taken; by default the whole prompt.
            n_reusable: Number of tokens at the start with which later prompts will begin, too.
        """
        device = self.loaded.device
        n_cached, cache = self.prefix_cache.start(self.loaded.model, beginnings or ids, device, n_reusable)
        tokens, mask = batching.pad_left([row[n_cached:] for row in ids], self.pad_id, device)
        mask = torch.cat([mask.new_ones(len(ids), n_cached), mask], dim=1)
        positions = batching.compute_positions(mask)[:, n_cached:]
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        return {**inputs, "past_key_values": cache, "use_cache": True}

    def split_inputs(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Split the arguments of a forward pass over one long prompt on a CPU into those of passes over PIECE_TOKENS tokens.

        Calls of other clients can only run between two layers, and a layer takes a second for 8,000 tokens at once.
        """
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        n_prompts, n_tokens = tokens.shape
        is_short = n_prompts > 1 or n_tokens <= LONG_PROMPT_TOKENS or self.loaded.device.type != "cpu"
        if is_short or not supports_partial_pass(self.loaded.model):
            return [inputs]
        pieces = []
        for start in range(0, n_tokens, PIECE_TOKENS):
            part = slice(start, start + PIECE_TOKENS)
            end = mask.shape[1] - n_tokens + min(part.stop, n_tokens)  # the mask begins with the cached prefix
            piece = {"input_ids": tokens[:, part], "position_ids": inputs["position_ids"][:, part]}
            pieces.append({**inputs, **piece, "attention_mask": mask[:, :end]})
        return pieces

    def run_alone(self, work: Callable[[], Result]) -> Result:
        """Run work on a single prompt, holding the model's lock."""
        with self.adapters.lock:
            return batching.run_single(work)


# --- scores of given tokens -----------------------------------------------------------------------


def read_label_logits(
    model: LocalModel, prompts: Sequence[tokenization.LabelPromptTokens], label_ids: Sequence[int]
) -> list[Vector]:
    """Compute the logits of labels, such as 'true' and 'false', inside prompts.

    Each prompt has one or more label positions.

    Args:
        model: The model.
        prompts: Tokenized label prompts.
        label_ids: First tokens of the labels.

    Returns:
        An array (positions x labels) per prompt.
    """
    llm = model.loaded.model
    # The forward pass returns no states of cached tokens, so the cached prefix must end before the first label
    # position. This is the last token of `beginnings`, and the last token is never taken from the cache.
    first_position = min(prompt.positions[0] for prompt in prompts)
    beginnings = [prompt.ids[: first_position + 1] for prompt in prompts]
    n_reusable = min(prompt.prefix for prompt in prompts)
    inputs = model.make_inputs([prompt.ids for prompt in prompts], beginnings, n_reusable)
    states = torch.cat([llm.base_model(**piece).last_hidden_state for piece in model.split_inputs(inputs)], dim=1)
    label_states = states[_locate_tokens([prompt.columns for prompt in prompts])]
    values: Vector = apply_lm_head(llm, label_states, label_ids).cpu().numpy()
    if not np.isfinite(values).all():
        raise batching.make_nan_error("NaN label logits")
    return tokenization.split_positions(values, prompts)


def _locate_tokens(columns: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Convert the columns of tokens in each row to a list of row numbers and a list of columns.

    Example: [[-2, -1], [-1]] becomes [0, 0, 1], [-2, -1, -1].
    """
    row_numbers = [row for row, row_columns in enumerate(columns) for _ in row_columns]
    return row_numbers, list(itertools.chain.from_iterable(columns))


def apply_lm_head(model: Any, states: torch.Tensor, token_ids: Sequence[int] | None = None) -> torch.Tensor:
    """Compute the logits of the next token from hidden states of the last layer.

    Args:
        model: The model, whose output layer is used.
        states: Hidden states of the last layer.
        token_ids: Tokens to compute logits of. Default: the whole vocabulary.
    """
    head = model.get_output_embeddings()
    selected = slice(None) if token_ids is None else torch.tensor(list(token_ids), device=states.device)
    logits = (states @ head.weight[selected].T).float()
    if getattr(head, "bias", None) is not None:
        logits = logits + head.bias[selected].float()
    config = model.config.get_text_config()
    logits = logits * float(getattr(config, "logit_scale", None) or 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


def compute_mean_logprobs(
    model: LocalModel, rows: Sequence[Sequence[int]], answer_lengths: Sequence[int]
) -> list[float]:
    """Compute the mean log-probability of the tokens of answers in one forward pass.

    Args:
        model: The model.
        rows: Token ids of each prompt and, after them, of its answer.
        answer_lengths: Number of tokens of each answer.
    """
    llm = model.loaded.model
    tokens, mask = batching.pad_left(rows, model.pad_id, model.loaded.device)
    positions = batching.compute_positions(mask)
    output = llm.base_model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    # Rows are padded on the left, so the columns of the answer tokens are counted from the end. An answer of two tokens
    # is in the columns -2 and -1. The states in the columns -3 and -2 predict it.
    token_rows, columns = _locate_tokens([range(-length, 0) for length in answer_lengths])
    predicting_columns = [column - 1 for column in columns]
    logits = apply_lm_head(llm, output.last_hidden_state[token_rows, predicting_columns])
    answer_tokens = tokens[token_rows, columns]
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, answer_tokens[:, None])[:, 0]
    if not bool(torch.isfinite(logprobs).all()):
        raise batching.make_nan_error()
    answers = logprobs.cpu().split(list(answer_lengths))
    return [float(answer.mean()) for answer in answers]
