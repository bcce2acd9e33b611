"""A GGUF model used as a binary classifier, run by llama.cpp in this process. Needs no torch."""

from __future__ import annotations

import functools
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, ModelError, WeightsError, require_extra
from knowgate.models.llamacpp.engine import count_usable_cores

# Added to the two label logits. It lifts them above all other tokens, and float32 still resolves their difference to
# 1e-5.
LABEL_LOGIT_BIAS = 100.0
CONTEXT_TOKENS = 4_096  # memory is allocated for them at the start
LOG_QUIET = -1
SERVER_SETTINGS = {
    "n_ctx": CONTEXT_TOKENS,
    "n_parallel": 1,
    "n_batch": CONTEXT_TOKENS,
    "n_ubatch": 512,
    "verbosity": LOG_QUIET,
    "warmup": False,
    "endpoint_slots": False,
    "hostnames": ["127.0.0.1"],
}
# Fields of a request for the probabilities of the two most probable tokens.
PAIR_REQUEST = {
    "n_predict": 1,
    "samplers": ["top_k"],
    "top_k": 2,
    "n_probs": 2,
    "post_sampling_probs": True,
    "cache_prompt": True,
}


@dataclass(frozen=True)
class LlamaCppClassifier:
    """A binary classifier that compares the probabilities of two tokens after a prompt.

    Text is tokenized with the tokenizer file from training.

    Args:
        file: The GGUF file, opened on first use.
        tokenizer_file: The tokenizer.json.
        cores: Number of threads; 0 for all cores that this process may use.
    """

    file: Path
    tokenizer_file: Path
    cores: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the `tokenizers` package."""
        with require_extra("running a judge from a GGUF file", "llamacpp"):
            from tokenizers import Tokenizer
        try:
            return Tokenizer.from_str(self.tokenizer_file.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise WeightsError(f"cannot read '{self.tokenizer_file}': {error}. Export the gate again.") from None

    @functools.cached_property
    def server(self) -> Any:
        """The in-process server of xllamacpp."""
        with require_extra("running a judge from a GGUF file", "llamacpp"):
            from xllamacpp import CommonParams, Server
        params = CommonParams()
        params.model.path = str(self.file)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.cores or count_usable_cores()
        secret_key = secrets.token_hex(16)  # needed because the server also listens on a port
        for name, value in {**SERVER_SETTINGS, "api_keys": [secret_key]}.items():
            setattr(params, name, value)
        try:
            return Server(params)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"llama.cpp cannot open '{self.file}': {error}. Export the gate again.") from None

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text; `special` adds the tokens that begin a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def score_token_pair(self, ids: Sequence[int], pair: Sequence[int]) -> float:
        """Return P(first) / (P(first) + P(second)) of two tokens that may follow a prompt.

        Args:
            ids: Token ids of the prompt.
            pair: The two tokens.

        Raises:
            BadInput: The prompt is too long.
        """
        if len(ids) >= CONTEXT_TOKENS:
            raise BadInput(
                f"the question makes a prompt of {len(ids)} tokens, but only {CONTEXT_TOKENS - 1} fit. Shorten the question."
            )
        # The bias makes the two tokens the most probable ones, and top_k=2 removes all others.
        bias = [[token, LABEL_LOGIT_BIAS] for token in pair]
        with self.lock:
            response = self.server.handle_completions({"prompt": list(ids), "logit_bias": bias, **PAIR_REQUEST})
        try:
            top = response["choices"][0]["logprobs"]["content"][0]["top_probs"]
            probabilities = {entry["id"]: float(entry["prob"]) for entry in top}
            first, second = [probabilities[token] for token in pair]
            return first / (first + second)
        except (KeyError, IndexError, TypeError, ZeroDivisionError):
            response_text = json.dumps(response)[:200]
            raise ModelError(
                f"llama.cpp did not return the probabilities of the two labels. It returned {response_text}. Check the release "
                "of xllamacpp, or export the gate again with `knowgate export-judge`."
            ) from None
