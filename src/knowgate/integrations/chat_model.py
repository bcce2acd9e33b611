"""An LLM behind another framework's chat interface, as a model of knowgate's: drafts, samples, and log-probabilities
where they come back. Hidden states never. Knows no framework: a subclass asks the LLM.

A chat interface cannot continue a draft: one that ended by itself is the answer and costs no second call, any other is
generated anew.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import wrap_errors
from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.models.backend import Backend, check_sampling
from knowgate.types import (
    Completion,
    LabelPrompt,
    Prompt,
    Reading,
    Sampling,
    Signal,
    SignalRequest,
    TextStream,
    Token,
    Vector,
)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
MAX_CONCURRENT_REQUESTS = 8


@dataclass(frozen=True)
class ChatRequest:
    """One request: a user turn and how it is answered."""

    text: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class ChatDraft:
    """A draft and what it answered; None where no draft was asked for."""

    prompt: Prompt
    completion: Completion | None

    def enough(self, max_tokens: int) -> Completion | None:
        done = self.completion
        return done if done is not None and (done.finished or done.n_tokens >= max_tokens) else None


class ChatModel(Backend):
    """What such models share. A subclass has `name`, and asks in `_ask` and, where it can, `_ask_in_parts`."""

    name: str
    depth = 0

    def __init__(self, name: str, *, logprobs: bool = False):
        self.name = name
        self._logprobs = logprobs

    @abstractmethod
    def _ask(self, asked: ChatRequest) -> Completion:
        """One answer."""

    def _ask_in_parts(self, asked: ChatRequest) -> Generator[str, None, Completion]:
        """The same, piece by piece; in one piece where the framework cannot."""
        completion = self._ask(asked)
        if completion.text:
            yield completion.text
        return completion

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the name alone: which weights answer to it cannot be seen from here."""
        return "chat-" + sha256_text("chat", self.name)[:16]

    @property
    def offers(self) -> frozenset[Signal]:
        offered = {Signal.DRAFT, Signal.SAMPLES}
        return frozenset(offered | {Signal.LOGPROBS} if self._logprobs else offered)

    @property
    def concurrency(self) -> int:
        return MAX_CONCURRENT_REQUESTS

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        if want.layers or want.sample_layer is not None:
            raise NotOffered(f"{self.name} is a chat interface and gives no hidden states; use an hf: model for them.")
        drafts = self._each(lambda prompt: self._draft(prompt, want.draft_tokens), prompts)
        samples = self._sample(prompts, want.sample_tokens, want.sampling, want.samples, want.seed)
        return [
            Reading(draft=draft, samples=tuple(drawn), resume=ChatDraft(prompt, draft))
            for prompt, draft, drawn in zip(prompts, drafts, samples, strict=True)
        ]

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
        """`max_tokens` counts the draft too."""
        if resume is not None:
            if temperature > 0 or n != 1:
                raise BadSetting("going on from a draft is greedy: use temperature 0 and n 1 with resume.")
            handles = [_handle(item) for _, item in zip(prompts, resume, strict=True)]
            return self._each(lambda draft: [self._go_on(draft, max_tokens)], handles)
        if temperature == 0:
            return self._each(lambda prompt: [self._greedy(prompt, max_tokens, seed)] * n if n else [], prompts)
        return self._sample(prompts, max_tokens, Sampling(temperature), n, seed)

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """As the framework hands it on; a draft that is enough is given as it is."""
        draft = ChatDraft(prompt, None) if resume is None else _handle(resume)
        done = draft.enough(max_tokens)
        if done is None:
            with wrap_errors(self.name):
                return self._checked((yield from self._ask_in_parts(ChatRequest(_turn(draft.prompt), max_tokens))))
        if done.text:
            yield done.text
        return done

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """A chat interface does not tell its window; it refuses what is too long."""
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise NotOffered(f"{self.name} is a chat interface and shows no labels; use an openai: or hf: model for them.")

    def _draft(self, prompt: Prompt, max_tokens: int) -> Completion | None:
        return self._greedy(prompt, max_tokens, None) if max_tokens else None

    def _greedy(self, prompt: Prompt, max_tokens: int, seed: int | None) -> Completion:
        with wrap_errors(self.name):
            return self._checked(self._ask(ChatRequest(_turn(prompt), max_tokens, seed=seed)))

    def _go_on(self, draft: ChatDraft, max_tokens: int) -> Completion:
        return draft.enough(max_tokens) or self._greedy(draft.prompt, max_tokens, None)

    def _sample(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling, n: int, seed: int | None
    ) -> list[list[Completion]]:
        """`n` requests per prompt; each has a seed of its own."""
        check_sampling(sampling)
        if sampling.top_k:
            raise NotOffered(f"{self.name} is a chat interface and takes no top_k: leave it out.")
        jobs = [
            ChatRequest(
                _turn(prompt), max_tokens, sampling.temperature, sampling.top_p, None if seed is None else seed + i
            )
            for prompt in prompts
            for i in range(n)
        ]
        with wrap_errors(self.name):
            drawn = self._each(self._ask, jobs)
        return [drawn[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _checked(self, completion: Completion) -> Completion:
        if self._logprobs and completion.tokens is None and completion.text:
            raise ModelError(f"{self.name} gave no log-probabilities. Leave logprobs out, and use a gate without them.")
        return completion

    def _each(self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
        """Side by side, in order. The first failure ends it."""
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(max_workers=min(MAX_CONCURRENT_REQUESTS, len(items))) as pool:
            return list(pool.map(work, items))


def parse_logprobs(given: Any) -> tuple[Token, ...] | None:
    """Tokens in OpenAI's form, `{"content": [{"token", "logprob", "top_logprobs"}]}`; None without them."""
    content = given.get("content") if isinstance(given, Mapping) else getattr(given, "content", None)
    if not content:
        return None
    return tuple(_token(one if isinstance(one, Mapping) else vars(one)) for one in content)


def _token(one: Mapping[str, Any]) -> Token:
    tops = [top if isinstance(top, Mapping) else vars(top) for top in one.get("top_logprobs") or ()]
    best = sorted((float(top["logprob"]) for top in tops), reverse=True)[:2]
    margin = None if len(best) < 2 else _p(best[0]) - _p(best[1])
    return Token(str(one["token"]), float(one["logprob"]), margin=margin)


def _p(logprob: float) -> float:
    return float(2.718281828459045**logprob)


def _turn(prompt: Prompt) -> str:
    if prompt.raw:
        raise NotOffered("a chat interface cannot continue a text as it stands; use an openai: or hf: model for that.")
    return prompt.text


def _handle(item: object) -> ChatDraft:
    if not isinstance(item, ChatDraft):
        raise BadSetting("resume takes the handles of this model's own readings.")
    return item
