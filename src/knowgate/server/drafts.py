"""The upstream's own answer as the draft a gate reads: a model that was asked already.

An upstream answers the application's request, not a prompt of ours; what it said is put here for the gate, by whoever
asked it (`reading_draft`). Knows records; nothing of HTTP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from knowgate.errors import NotOffered
from knowgate.models import Backend, OpenAIModel
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Signal, Vector, Want

DRAFT: ContextVar[Completion | None] = ContextVar("what the upstream answered", default=None)


@contextmanager
def reading_draft(draft: Completion | None) -> Iterator[None]:
    """What is decided inside is decided on this draft."""
    token = DRAFT.set(draft)
    try:
        yield
    finally:
        DRAFT.reset(token)


class AskedModel(Backend):
    """Gives drafts that are there already. url, model: of the upstream, which fitted gates are held against."""

    offers = frozenset({Signal.DRAFT, Signal.LOGPROBS})
    depth = 0

    def __init__(self, url: str, model: str | None):
        self._url = url
        self._model = model

    @property
    def name(self) -> str:
        return f"openai:{self._model or 'upstream'}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """As of the same LLM in `openai:MODEL@URL`, which gates are fitted on."""
        if self._model is None:
            return "openai-unnamed"
        asked = OpenAIModel(self._model, self._url)
        try:
            return asked.fingerprint
        finally:
            asked.close()

    def read(self, prompts: Sequence[Prompt], want: Want) -> list[Reading]:
        draft = DRAFT.get()
        if draft is None:
            raise NotOffered("the upstream was not asked for a draft.")
        return [Reading(draft=draft) for _ in prompts]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """Nothing: follow-ups are then joined to the question before them, without a call."""
        return [[Completion("")] for _ in prompts]

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise NotOffered("the upstream is asked nothing beside what the application asks.")
