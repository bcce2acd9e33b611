"""A transformers model on this machine: its weights, its tokenizer, its window. Reads and generates nothing itself."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from knowgate.errors import BadInput, ModelError
from knowgate.models.hf import loader as hf_load
from knowgate.models.hf.batching import BatchWork, compute_batch_limits, run_in_batches, run_single
from knowgate.models.hf.decoding import pad_left
from knowgate.models.hf.forward_pass import PrefixCache, supports_shared_cache
from knowgate.models.hf.loader import LoraAdapters
from knowgate.models.tokenization import (
    LabelPromptTokens,
    TurnTemplate,
    escape_special_tokens,
    extract_plain_turn_template,
    is_plain_text,
)
from knowgate.types import Prompt, Result, Vector

TOKEN_CACHE_SIZE = 4_096  # whose tokens are kept, four bytes each: two portions of a run


@dataclass(frozen=True)
class LocalModel:
    """What everything that reads from a loaded model needs of it. Nothing is loaded before it is used.

    bits: 4 or 8, to hold the weights in as many (CUDA, bitsandbytes).
    """

    source: str
    label: str = ""
    bits: int = 0

    @property
    def name(self) -> str:
        return self.label or f"hf:{self.source}"

    @functools.cached_property
    def fingerprint(self) -> str:
        local = Path(self.source).is_dir()
        commit = None if local else getattr(self.config, "_commit_hash", None)
        return hf_load.compute_fingerprint(self.source, commit)

    @functools.cached_property
    def config(self) -> Any:
        """Known without the weights: whoever has the work done elsewhere never loads them."""
        return self.loaded.model.config if "loaded" in vars(self) else hf_load.load_transformers_config(self.source)

    @functools.cached_property
    def loaded(self) -> hf_load.LoadedModel:
        return hf_load.load_transformers(self.source, self.bits)

    @functools.cached_property
    def adapters(self) -> LoraAdapters:
        return LoraAdapters(self.loaded.model)

    @functools.cached_property
    def prefixes(self) -> PrefixCache:
        return PrefixCache()

    @functools.cached_property
    def shares(self) -> bool:
        """Whether the answers to a prompt can share its keys and values."""
        return supports_shared_cache(self.loaded.model)

    def share_weights(self) -> Self:
        """The same weights, with beginnings of prompts of its own: those run with an adapter are no good without."""
        other = replace(self)
        vars(other).update(loaded=self.loaded, adapters=self.adapters)
        return other

    @functools.cached_property
    def stop(self) -> frozenset[int]:
        """Every token that ends an answer."""
        generation = getattr(self.loaded.model, "generation_config", None)
        named = [getattr(generation, "eos_token_id", None), self.loaded.tokenizer.eos_token_id]
        flat = [item for ids in named for item in (ids if isinstance(ids, list) else [ids])]
        return frozenset(item for item in flat if item is not None)

    @property
    def pad(self) -> int:
        return int(self.loaded.tokenizer.pad_token_id or 0)

    @property
    def window(self) -> int:
        """Tokens the model can see at once."""
        config = self.loaded.model.config
        return int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20))

    @property
    def depth(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers) + 1

    @property
    def has_template(self) -> bool:
        return bool(self.loaded.tokenizer.chat_template)

    def render(self, text: str) -> str:
        """The text as a user turn, up to where the answer begins. Models without a chat template get it bare."""
        if not self.has_template:
            return text
        if self._turn is not None and is_plain_text(text):
            return self._turn.render(text)
        return self._render(text)

    def _render(self, text: str) -> str:
        tokenizer = self.loaded.tokenizer
        turn = [{"role": "user", "content": escape_special_tokens(text, tokenizer.all_special_tokens)}]
        return str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))

    @functools.cached_property
    def _turn(self) -> TurnTemplate | None:
        """What the template puts around a plain text, whatever it is; None where that cannot be told."""
        tokenizer = self.loaded.tokenizer
        return extract_plain_turn_template(self._render, tokenizer.all_special_tokens, str(tokenizer.chat_template))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.loaded.tokenizer.encode(text, add_special_tokens=special))

    def tokenize_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """In one go: on all cores, without the interpreter."""
        return [ids.tolist() for ids in self._tokenize_all(list(texts), special=special)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the whole input, in the chat template where there is one."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """`encode` for many, in one go. Those of the last prompts are kept: one that was seen to fit the window is read
        next."""
        kept = self._encoded
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in kept]
        for special in (False, True):
            some = [prompt for prompt in fresh if self._is_chat(prompt) is not special]
            texts = [prompt.text if special else self.render(prompt.text) for prompt in some]
            kept.update(zip(some, self._tokenize_all(texts, special=special), strict=True))
        ids = [kept[prompt].tolist() for prompt in prompts]
        for prompt in list(kept)[: max(0, len(kept) - TOKEN_CACHE_SIZE)]:
            del kept[prompt]
        return ids

    @functools.cached_property
    def _encoded(self) -> dict[Prompt, array[int]]:
        return {}

    def _is_chat(self, prompt: Prompt) -> bool:
        return not prompt.raw and self.has_template

    def _tokenize_all(self, texts: list[str], *, special: bool) -> list[array[int]]:
        if not texts:
            return []
        tokenised = self.loaded.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)
        return [array("i", ids) for ids in tokenised["input_ids"]]

    @functools.cached_property
    def token_text(self) -> Callable[[int], str]:
        """What a token stands for by itself, looked up once."""
        return functools.cache(lambda token: str(self.loaded.tokenizer.decode([token])))

    def check_length(self, n_tokens: int, room: int) -> None:
        if n_tokens + room > self.window:
            raise BadInput(
                f"the prompt has {n_tokens} tokens and the answer may take {room}, but {self.name} sees only "
                f"{self.window}. Shorten the question, or use fewer or shorter passages."
            )

    def run_batched(self, ids: list[list[int]], work: BatchWork[Result], rows: int = 1) -> list[Result]:
        loaded = self.loaded
        with self.adapters.turn:
            limits = compute_batch_limits(loaded.model, loaded.device, shared=self.shares)
            return run_in_batches(ids, limits, work, rows, loaded.device)

    def run_alone(self, work: Callable[[], Result]) -> Result:
        """Work on a single question, in its turn like all that runs the weights."""
        with self.adapters.turn:
            return run_single(work)


def read_label_logits(model: LocalModel, prompts: Sequence[LabelPromptTokens], columns: Sequence[int]) -> list[Vector]:
    """For each prompt an array (marked positions x labels), from one forward pass over all."""
    device = model.loaded.device
    first_mark = min(prompt.positions[0] for prompt in prompts)
    beginnings = [prompt.ids[: first_mark + 1] for prompt in prompts]
    shared = min(prompt.prefix for prompt in prompts)
    done, cache = model.prefixes.start(model.loaded.model, beginnings, device, worth_keeping=shared)
    tokens, mask = pad_left([prompt.ids[done:] for prompt in prompts], model.pad, device)
    mask = torch.cat([mask.new_ones(len(prompts), done), mask], dim=1)
    states = model.loaded.model.base_model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, done:],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    width = tokens.shape[1]
    line = [row for row, prompt in enumerate(prompts) for _ in prompt.positions]
    place = [width - len(prompt.ids) + mark for prompt in prompts for mark in prompt.positions]
    values = _logits(model.loaded.model, states[line, place], columns)
    ends = np.cumsum([len(prompt.positions) for prompt in prompts])[:-1]
    return [part.copy() for part in np.split(values, ends)]


def _logits(model: Any, states: torch.Tensor, columns: Sequence[int]) -> Vector:
    """The head applied to these states and label tokens alone: the other 50,000 columns are nobody's business."""
    values: Vector = apply_lm_head(model, states, columns).cpu().numpy()
    if not np.isfinite(values).all():
        raise ModelError("the model gave NaN instead of label logits: its weights or number format are bad.")
    return values


def apply_lm_head(model: Any, states: torch.Tensor, columns: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of the given tokens, or of all, as the model itself computes them: with its bias, scale and cap."""
    head = model.get_output_embeddings()
    chosen = slice(None) if columns is None else torch.tensor(list(columns), device=states.device)
    logits = (states @ head.weight[chosen].T).float()
    if getattr(head, "bias", None) is not None:
        logits = logits + head.bias[chosen].float()
    config = model.config.get_text_config()
    logits = logits * float(getattr(config, "logit_scale", None) or 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt followed by an answer; the last `answer` tokens of `ids` are the answer's."""

    ids: list[int]
    answer: int


def compute_mean_logprobs(model: LocalModel, rows: Sequence[AnsweredPrompt]) -> list[float]:
    """Mean log-probability of each row's answer tokens; the head is applied at their places alone."""
    tokens, mask = pad_left([row.ids for row in rows], model.pad, model.loaded.device)
    states = model.loaded.model.base_model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    width = tokens.shape[1]
    line = [number for number, row in enumerate(rows) for _ in range(row.answer)]
    place = [width - row.answer + step for row in rows for step in range(row.answer)]
    before = [position - 1 for position in place]
    logp = torch.log_softmax(apply_lm_head(model.loaded.model, states[line, before]), dim=-1)
    values = logp.gather(1, tokens[line, place][:, None])[:, 0]
    if not bool(torch.isfinite(values).all()):
        raise ModelError("the model gave NaN instead of token probabilities: its weights or number format are bad.")
    return [float(part.mean()) for part in values.cpu().split([row.answer for row in rows])]
