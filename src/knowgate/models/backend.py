"""What a backend has unless it says otherwise: one caller at a time, and text that comes in one piece.

Knows nothing of any model. A backend derives from `Backend` and overrides what it can do better.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting
from knowgate.types import Completion, Prompt, Sampling, SignalRequest, TextStream

# A word with the space before it; Chinese, Japanese and Korean characters stand alone.
WORD_PATTERN = re.compile(r"\s*(?:[぀-ヿ㐀-鿿가-힣]|[^\s぀-ヿ㐀-鿿가-힣]+)|\s+")


class Backend(ABC):
    """The parts of a model that most backends share."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]: ...

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """The whole text as one piece."""
        completion = self._complete_one(prompt, max_tokens, resume)
        if completion.text:
            yield completion.text
        return completion

    def _complete_one(self, prompt: Prompt, max_tokens: int, resume: object | None) -> Completion:
        handles = None if resume is None else [resume]
        return self.generate([prompt], max_tokens=max_tokens, resume=handles)[0][0]

    @property
    def concurrency(self) -> int:
        """Weights on this machine are used by one thread at a time; so is what we know nothing of."""
        return 1

    @property
    def workers(self) -> Executor:
        """Started on first use. `setdefault` is one step, so that two threads get the same ones."""
        mine: Executor | None = self.__dict__.get("_workers")
        if mine is None:
            mine = self.__dict__.setdefault("_workers", ThreadPoolExecutor(self.concurrency, "knowgate-model"))
        return mine


class WordStreamBackend(Backend):
    """A backend that has its whole text at once and hands it out in words."""

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        completion = self._complete_one(prompt, max_tokens, resume)
        yield from WORD_PATTERN.findall(completion.text)
        return completion


def check_sampling(sampling: Sampling) -> None:
    """Raise unless answers can be drawn like this."""
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not (math.isfinite(temperature) and temperature > 0):
        raise BadSetting(f"sampling needs a temperature above 0, not {temperature}.")
    if not 0 < top_p <= 1:
        raise BadSetting(f"top_p is {top_p}; it must be above 0 and at most 1, which cuts nothing off.")
    if top_k < 0:
        raise BadSetting(f"top_k is {top_k}; it must be at least 0, which cuts nothing off.")


def apply_sampling(probabilities: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that is drawn from, in the order of the one given."""
    scaled = probabilities ** (1 / sampling.temperature)
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    best = scaled[order] / scaled[order].sum()
    best[np.cumsum(best) - best >= sampling.top_p] = 0
    shares = np.zeros_like(scaled)
    shares[order] = best / best.sum()
    return shares


def draw_uniforms(prompt: Prompt, want: SignalRequest) -> NDArray[np.float64]:
    """Random numbers, one for each token of each sample, that depend on the seed and the prompt alone."""
    if want.seed is None:
        return np.random.default_rng().random((want.samples, want.sample_tokens))
    key = hashlib.sha256(f"{want.seed}\0{prompt.text}".encode()).digest()
    return np.random.default_rng(np.frombuffer(key, dtype=np.uint32)).random((want.samples, want.sample_tokens))
