"""A GGUF file run by llama.cpp in this process: which of two tokens comes next. No torch is needed.

Tokens come from the tokenizer file beside it, so that they are those of training whatever llama.cpp makes of a text.
llama.cpp keeps what the last prompt began with, so that prompts that begin alike pay for it once.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, MissingExtra, ModelError, WeightsError

LABEL_LOGIT_BIAS = (
    100.0  # added to the two logits: above every other token, and float32 still tells their difference to 1e-5
)
CONTEXT_TOKENS = 4_096  # tokens of a prompt; memory is taken for them at the start
LOG_QUIET = -1


@dataclass(frozen=True)
class LlamaCppClassifier:
    """A model in a GGUF file and its tokenizer (tokenizer.json). Both are opened on first use; threads take turns.

    cores: to run on; 0: all.
    """

    file: Path
    tokenizer_file: Path
    cores: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @functools.cached_property
    def tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise MissingExtra("a judge in a GGUF file", "llamacpp") from None
        try:
            return Tokenizer.from_str(self.tokenizer_file.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise WeightsError(f"cannot read the tokenizer '{self.tokenizer_file}': {error}.") from None

    @functools.cached_property
    def server(self) -> Any:
        try:
            from xllamacpp import CommonParams, Server
        except ModuleNotFoundError:
            raise MissingExtra("a judge in a GGUF file", "llamacpp") from None
        settings = CommonParams()
        settings.model.path = str(self.file)
        settings.n_ctx, settings.n_parallel, settings.n_batch, settings.n_ubatch = (
            CONTEXT_TOKENS,
            1,
            CONTEXT_TOKENS,
            512,
        )
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = self.cores or os.cpu_count() or 1
        settings.hostnames, settings.api_keys = ["127.0.0.1"], [secrets.token_hex(16)]  # it listens, too: to nobody
        settings.verbosity, settings.warmup, settings.endpoint_slots = LOG_QUIET, False, False
        try:
            return Server(settings)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"llama.cpp cannot open '{self.file}': {error}. Export the judge again.") from None

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def score_token_pair(self, ids: Sequence[int], pair: Sequence[int]) -> float:
        """P(first) / (P(first) + P(second)) of two tokens after a prompt."""
        if len(ids) >= CONTEXT_TOKENS:
            raise BadInput(
                f"the judge's prompt has {len(ids)} tokens and it sees only {CONTEXT_TOKENS}. Shorten the question."
            )
        request = {
            "prompt": list(ids),
            "n_predict": 1,
            "logit_bias": [[token, LABEL_LOGIT_BIAS] for token in pair],
            "samplers": ["top_k"],
            "top_k": 2,
            "n_probs": 2,
            "post_sampling_probs": True,
            "cache_prompt": True,
        }
        with self.turn:
            reply = self.server.handle_completions(request)
        return _share(reply, pair)


def _share(reply: Any, pair: Sequence[int]) -> float:
    try:
        told = reply["choices"][0]["logprobs"]["content"][0]["top_probs"]
        found = {item["id"]: float(item["prob"]) for item in told}
        return found[pair[0]] / (found[pair[0]] + found[pair[1]])
    except (KeyError, IndexError, TypeError, ZeroDivisionError):
        raise ModelError(f"llama.cpp did not say how probable two tokens are: {json.dumps(reply)[:200]}") from None
