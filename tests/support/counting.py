"""A wrapper that records the calls of a model, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knowgate.models.backend import Backend
from knowgate.types import Completion, LabelPrompt, Model, Prompt, Reading, Signal, SignalRequest, Vector


class CountingModel(Backend):
    """Passes all calls to `model`; `calls` holds the method and the number of prompts of each."""

    def __init__(self, model: Model):
        self._model = model
        self.calls: list[tuple[str, int]] = []

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    @property
    def offers(self) -> frozenset[Signal]:
        return self._model.offers

    @property
    def depth(self) -> int:
        return self._model.depth

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        self.calls.append(("read", len(prompts)))
        return self._model.read(prompts, want)

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[list[Completion]]:
        self.calls.append(("generate", len(prompts)))
        return self._model.generate(prompts, **settings)

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        self.calls.append(("label_logits", len(prompts)))
        return self._model.label_logits(prompts, labels)

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        self.calls.append(("fits", len(prompts)))
        return self._model.fits(prompts, max_tokens)
