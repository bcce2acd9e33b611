"""A transformers model on this machine: its weights, its tokenizer, its window. Reads and generates nothing itself."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from knowgate.errors import BadInput
from knowgate.models.hf import load as hf_load
from knowgate.models.hf.adapters import Adapters
from knowgate.models.hf.batches import Work, limits_of, run_alone, run_batched
from knowgate.models.hf.prefix import Prefixes
from knowgate.models.hf.shared import can_share
from knowgate.models.turns import Turn, as_text, is_plain, plain_turn
from knowgate.types import Prompt, Result

KEPT_PROMPTS = 4_096  # whose tokens are kept, four bytes each: two portions of a run


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
        return hf_load.fingerprint(self.source, commit)

    @functools.cached_property
    def config(self) -> Any:
        """Known without the weights: whoever has the work done elsewhere never loads them."""
        return self.loaded.model.config if "loaded" in vars(self) else hf_load.load_config(self.source)

    @functools.cached_property
    def loaded(self) -> hf_load.Loaded:
        return hf_load.load(self.source, self.bits)

    @functools.cached_property
    def adapters(self) -> Adapters:
        return Adapters(self.loaded.model)

    @functools.cached_property
    def prefixes(self) -> Prefixes:
        return Prefixes()

    @functools.cached_property
    def shares(self) -> bool:
        """Whether the answers to a prompt can share its keys and values."""
        return can_share(self.loaded.model)

    def twin(self) -> Self:
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
        if self._turn is not None and is_plain(text):
            return self._turn.render(text)
        return self._render(text)

    def _render(self, text: str) -> str:
        tokenizer = self.loaded.tokenizer
        turn = [{"role": "user", "content": as_text(text, tokenizer.all_special_tokens)}]
        return str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))

    @functools.cached_property
    def _turn(self) -> Turn | None:
        """What the template puts around a plain text, whatever it is; None where that cannot be told."""
        tokenizer = self.loaded.tokenizer
        return plain_turn(self._render, tokenizer.all_special_tokens, str(tokenizer.chat_template))

    def tokenise(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.loaded.tokenizer.encode(text, add_special_tokens=special))

    def tokenise_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """In one go: on all cores, without the interpreter."""
        return [ids.tolist() for ids in self._tokenise_all(list(texts), special=special)]

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
            kept.update(zip(some, self._tokenise_all(texts, special=special), strict=True))
        ids = [kept[prompt].tolist() for prompt in prompts]
        for prompt in list(kept)[: max(0, len(kept) - KEPT_PROMPTS)]:
            del kept[prompt]
        return ids

    @functools.cached_property
    def _encoded(self) -> dict[Prompt, array[int]]:
        return {}

    def _is_chat(self, prompt: Prompt) -> bool:
        return not prompt.raw and self.has_template

    def _tokenise_all(self, texts: list[str], *, special: bool) -> list[array[int]]:
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

    def batched(self, ids: list[list[int]], work: Work[Result], rows: int = 1) -> list[Result]:
        loaded = self.loaded
        with self.adapters.turn:
            limits = limits_of(loaded.model, loaded.device, shared=self.shares)
            return run_batched(ids, limits, work, rows, loaded.device)

    def alone(self, work: Callable[[], Result]) -> Result:
        """Work on a single question, in its turn like all that runs the weights."""
        with self.adapters.turn:
            return run_alone(work)
