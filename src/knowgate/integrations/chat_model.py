"""Base class for LLMs behind the chat interface of another framework.

Such a model offers drafts, samples and, if the framework returns them, log-probabilities; never hidden states. A chat
interface cannot continue a draft: a finished draft is the answer and costs no second call, any other is generated anew.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import wrap_errors
from knowgate.errors import ModelError, UnsupportedSignal
from knowgate.models.backend import Backend, check_resume_handle, check_resume_options, check_sampling
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
    """A user message and how to answer it."""

    text: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class ChatDraft:
    """The resume handle of a reading: a prompt and its draft; None if no draft was requested."""

    prompt: Prompt
    completion: Completion | None

    def get_answer(self, max_tokens: int) -> Completion | None:
        """Return the draft if it is a complete answer."""
        draft = self.completion
        return draft if draft is not None and (draft.finished or draft.n_tokens >= max_tokens) else None


class ChatModel(Backend):
    """An LLM behind a chat interface. A subclass implements `_complete` and, if possible, `_stream`.

    Args:
        name: Name of the model, which is also its identity.
        logprobs: Whether the framework returns log-probabilities.
    """

    name: str
    depth = 0

    def __init__(self, name: str, *, logprobs: bool = False):
        self.name = name
        self._logprobs = logprobs

    @abstractmethod
    def _complete(self, request: ChatRequest) -> Completion:
        """Answer one request."""

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        """Answer one request piece by piece; by default in one piece."""
        completion = self._complete(request)
        if completion.text:
            yield completion.text
        return completion

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the name; a client cannot see which weights are behind it."""
        return "chat-" + sha256_text("chat", self.name)[:16]

    @property
    def offers(self) -> frozenset[Signal]:
        signals = {Signal.DRAFT, Signal.SAMPLES}
        return frozenset(signals | {Signal.LOGPROBS} if self._logprobs else signals)

    @property
    def concurrency(self) -> int:
        return MAX_CONCURRENT_REQUESTS

    def read(self, prompts: Sequence[Prompt], request: SignalRequest, /) -> list[Reading]:
        """Draft and sample as requested; see `knowgate.types.Model.read`."""
        if request.layers or request.sample_layer is not None:
            raise UnsupportedSignal(
                f"{self.name} is a chat interface without hidden states. Use an hf: model for them."
            )
        tokens = request.draft_tokens
        drafts = self._map(lambda prompt: self._complete_greedily(prompt, tokens) if tokens else None, prompts)
        samples = self._sample(prompts, request.sample_tokens, request.sampling, request.samples, request.seed)
        return [
            Reading(draft=draft, samples=tuple(completions), resume=ChatDraft(prompt, draft))
            for prompt, draft, completions in zip(prompts, drafts, samples, strict=True)
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
        """Return `n` completions per prompt; `max_tokens` includes the draft that `resume` continues."""
        if resume is not None:
            check_resume_options(temperature, n)
            drafts = [check_resume_handle(handle, ChatDraft) for _, handle in zip(prompts, resume, strict=True)]
            return self._map(lambda draft: [self._continue_draft(draft, max_tokens)], drafts)
        if temperature == 0:
            return self._map(
                lambda prompt: [self._complete_greedily(prompt, max_tokens, seed)] * n if n else [], prompts
            )
        return self._sample(prompts, max_tokens, Sampling(temperature), n, seed)

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the answer as the framework streams it; a complete draft is yielded as one piece."""
        draft = ChatDraft(prompt, None) if resume is None else check_resume_handle(resume, ChatDraft)
        answer = draft.get_answer(max_tokens)
        if answer is None:
            with wrap_errors(self.name):
                request = ChatRequest(_get_user_message(draft.prompt), max_tokens)
                return self._check_logprobs((yield from self._stream(request)))
        if answer.text:
            yield answer.text
        return answer

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return True for every prompt, because a chat interface does not tell its context size."""
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise UnsupportedSignal(
            f"{self.name} is a chat interface without label logits. Use an openai: or hf: model for them."
        )

    def _complete_greedily(self, prompt: Prompt, max_tokens: int, seed: int | None = None) -> Completion:
        with wrap_errors(self.name):
            return self._check_logprobs(self._complete(ChatRequest(_get_user_message(prompt), max_tokens, seed=seed)))

    def _continue_draft(self, draft: ChatDraft, max_tokens: int) -> Completion:
        return draft.get_answer(max_tokens) or self._complete_greedily(draft.prompt, max_tokens)

    def _sample(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling, n: int, seed: int | None
    ) -> list[list[Completion]]:
        """Send `n` requests per prompt, each with its own seed."""
        check_sampling(sampling)
        if sampling.top_k:
            raise UnsupportedSignal(f"{self.name} is a chat interface without `top_k`. Leave it out.")
        seeds = [None if seed is None else seed + index for index in range(n)]
        requests = [
            ChatRequest(_get_user_message(prompt), max_tokens, sampling.temperature, sampling.top_p, request_seed)
            for prompt in prompts
            for request_seed in seeds
        ]
        with wrap_errors(self.name):
            completions = self._map(self._complete, requests)
        return [completions[index * n : (index + 1) * n] for index in range(len(prompts))]

    def _check_logprobs(self, completion: Completion) -> Completion:
        if self._logprobs and completion.tokens is None and completion.text:
            raise ModelError(
                f"{self.name} returned no log-probabilities. Leave `logprobs` out and use a gate without them."
            )
        return completion

    def _make_options(self, request: ChatRequest) -> dict[str, Any]:
        """Return the options of a request under the names that OpenAI and most frameworks use."""
        options: dict[str, Any] = {"max_tokens": request.max_tokens, "temperature": request.temperature}
        options |= {"top_p": request.top_p} if request.temperature and request.top_p < 1 else {}
        options |= {"seed": request.seed} if request.seed is not None else {}
        return options | ({"logprobs": True, "top_logprobs": 2} if self._logprobs else {})

    def _map(self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
        """Apply `work` to each item concurrently and return the results in order."""
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(max_workers=min(MAX_CONCURRENT_REQUESTS, len(items))) as pool:
            return list(pool.map(work, items))


def make_completion(text: str, tokens: tuple[Token, ...] | None, n_tokens: int | None, finished: bool) -> Completion:
    """Make a completion; without a token count of the provider, count the tokens, or else the words."""
    return Completion(text, tokens, finished=finished, n_tokens=n_tokens or len(tokens or text.split()))


def parse_logprobs(value: Any) -> tuple[Token, ...] | None:
    """Parse tokens in OpenAI's format, `{"content": [{"token", "logprob", "top_logprobs"}]}`; None if missing."""
    content = value.get("content") if isinstance(value, Mapping) else getattr(value, "content", None)
    return tuple(_parse_token(_as_mapping(item)) for item in content) if content else None


def _parse_token(item: Mapping[str, Any]) -> Token:
    alternatives = [float(_as_mapping(top)["logprob"]) for top in item.get("top_logprobs") or ()]
    best = sorted(alternatives, reverse=True)[:2]
    margin = math.exp(best[0]) - math.exp(best[1]) if len(best) == 2 else None
    return Token(str(item["token"]), float(item["logprob"]), margin=margin)


def _as_mapping(item: Any) -> Mapping[str, Any]:
    return item if isinstance(item, Mapping) else vars(item)


def _get_user_message(prompt: Prompt) -> str:
    if prompt.raw:
        raise UnsupportedSignal("a chat interface cannot continue a raw text. Use an openai: or hf: model for that.")
    return prompt.text
