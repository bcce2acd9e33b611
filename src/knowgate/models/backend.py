"""What a backend has unless it says otherwise: one caller at a time, and text that comes in one piece.

Knows nothing of any model. A backend derives from `Backend` and overrides what it can do better.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from knowgate.types import Completion, Prompt, TextStream

# A word with the space before it; Chinese, Japanese and Korean characters stand alone.
WORD = re.compile(r"\s*(?:[぀-ヿ㐀-鿿가-힣]|[^\s぀-ヿ㐀-鿿가-힣]+)|\s+")


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


class WordByWord(Backend):
    """A backend that has its whole text at once and hands it out in words."""

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        completion = self._complete_one(prompt, max_tokens, resume)
        yield from WORD.findall(completion.text)
        return completion
