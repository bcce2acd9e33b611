"""Base class for LLMs behind the chat interface of another framework.

Such a model can draft an answer, sample several answers and, if the framework supports it, return log-probabilities. It
never returns hidden states. A chat interface cannot continue a draft. If the draft is complete, it becomes the answer
without a second call. Otherwise the answer is generated from the start.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import wrap_errors
from knowgate.errors import ModelError, UnsupportedSignal
from knowgate.models.backend import RemoteDraft, SinglePromptBackend, check_resume_handle, check_sampling
from knowgate.models.openai import responses
from knowgate.types import TextStream, Vector
from knowgate.types.records import Completion, LabelPrompt, Prompt, Reading, Sampling, Signal, SignalRequest, Token


@dataclass(frozen=True)
class ChatRequest:
    """A user message to send to an LLM, and the settings for its answer.

    Args:
        text: The message.
        max_tokens: Maximum number of tokens of the answer.
        temperature: 0 for the greedy answer, above 0 for a random one.
        top_p: Draw only from the most probable tokens, which have this probability together.
        seed: Seed for a random answer; None for none.
    """

    text: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class ChatModel(SinglePromptBackend):
    """LLM behind the chat interface of another framework.

    Subclasses implement `_complete`, and `_stream` for streaming.

    Args:
        name: The name of the model. It also identifies the model in fingerprints.
        logprobs: Whether the framework returns the log-probabilities of tokens.
    """

    name: str
    depth = 0  # a chat interface returns no hidden states
    concurrency = 8  # how many requests may run at the same time

    def __init__(self, name: str, *, logprobs: bool = False):
        self.name = name
        self._logprobs = logprobs

    @abstractmethod
    def _complete(self, request: ChatRequest) -> Completion:
        """Send one request and return the answer."""

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        """Yield the answer to one request piece by piece, and return it whole. By default, there is one piece."""
        completion = self._complete(request)
        if completion.text:
            yield completion.text
        return completion

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the model name, because a client cannot see which weights the provider runs."""
        return "chat-" + sha256_text("chat", self.name)[:16]

    @property
    def offers(self) -> frozenset[Signal]:
        """Signals for gates: drafts, samples, and log-probabilities if available."""
        logprobs = {Signal.LOGPROBS} if self._logprobs else set()
        return frozenset({Signal.DRAFT, Signal.SAMPLES} | logprobs)

    def read(self, prompts: Sequence[Prompt], request: SignalRequest, /) -> list[Reading]:
        """Return the signals for the gate per prompt: a draft and sampled answers.

        `resume` keeps the draft for `generate`.

        Raises:
            UnsupportedSignal: Hidden states were requested, which a chat interface does not return.
        """
        if request.layers or request.sample_layer is not None:
            raise UnsupportedSignal(
                f"{self.name} returns no hidden states. Use an hf: model, or a gate that needs none."
            )
        drafts: list[Completion | None] = [None] * len(prompts)
        if request.draft_tokens:
            drafts = self._map(lambda prompt: self._complete_greedily(prompt, request.draft_tokens), prompts)
        samples = self._sample(prompts, request.sample_tokens, request.sampling, request.samples, request.seed)
        return [
            Reading(draft=draft, samples=tuple(completions), resume=RemoteDraft(prompt, draft))
            for prompt, draft, completions in zip(prompts, drafts, samples, strict=True)
        ]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the answer piece by piece, and return it whole. A complete draft in `resume` needs no request."""
        draft = RemoteDraft(prompt, None) if resume is None else check_resume_handle(resume, RemoteDraft)
        answer = draft.get_answer(max_tokens)  # None if the draft is not complete
        if answer is not None:
            if answer.text:
                yield answer.text
            return answer
        with wrap_errors(self.name):
            completion = yield from self._stream(ChatRequest(_get_user_message(draft.prompt), max_tokens))
            return self._check_logprobs(completion)

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Raise UnsupportedSignal, because a chat interface cannot compute the probabilities of yes and no."""
        raise UnsupportedSignal(
            f"{self.name} cannot compute the probabilities of answers such as yes and no. Use an openai: or hf: model."
        )

    def _complete_greedily(self, prompt: Prompt, max_tokens: int, seed: int | None = None) -> Completion:
        """Return the answer to a prompt at temperature 0."""
        with wrap_errors(self.name):
            return self._check_logprobs(self._complete(ChatRequest(_get_user_message(prompt), max_tokens, seed=seed)))

    def _complete_draft(self, draft: RemoteDraft, max_tokens: int, seed: int | None = None) -> Completion:
        """Return a complete draft as it is; otherwise generate the answer from the start."""
        return draft.get_answer(max_tokens) or self._complete_greedily(draft.prompt, max_tokens, seed)

    def _sample(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling, n: int, seed: int | None
    ) -> list[list[Completion]]:
        """Return `n` sampled completions per prompt.

        Each has its own request, with seeds `seed`, `seed + 1` and so on.
        """
        check_sampling(sampling)
        if sampling.top_k:
            raise UnsupportedSignal(f"{self.name} is a chat interface and does not support `top_k`. Leave `top_k` out.")
        seeds = [None] * n if seed is None else range(seed, seed + n)
        requests: list[ChatRequest] = []
        for prompt in prompts:
            request = ChatRequest(_get_user_message(prompt), max_tokens, sampling.temperature, sampling.top_p)
            requests += [replace(request, seed=own_seed) for own_seed in seeds]
        with wrap_errors(self.name):
            completions = self._map(self._complete, requests)
        # The completions of all prompts are in one list, n for each prompt.
        return [completions[index * n : (index + 1) * n] for index in range(len(prompts))]

    def _check_logprobs(self, completion: Completion) -> Completion:
        """Return the completion unchanged.

        Raises:
            ModelError: The completion has no log-probabilities, although they were requested.
        """
        if self._logprobs and completion.tokens is None and completion.text:
            raise ModelError(f"{self.name} returned no log-probabilities. Leave `logprobs` out, and use another gate.")
        return completion

    def _make_options(self, request: ChatRequest) -> dict[str, Any]:
        """Return the settings of a request as keyword arguments, named as in the API of OpenAI."""
        options: dict[str, Any] = {"max_tokens": request.max_tokens, "temperature": request.temperature}
        if request.temperature and request.top_p < 1:
            options["top_p"] = request.top_p
        if request.seed is not None:
            options["seed"] = request.seed
        if self._logprobs:
            options |= {"logprobs": True, "top_logprobs": 2}  # two tokens, to compute the margin between them
        return options


def make_completion(text: str, tokens: tuple[Token, ...] | None, n_tokens: int | None, finished: bool) -> Completion:
    """Make a completion from the answer of a framework.

    Args:
        text: The text of the answer.
        tokens: Its tokens with their log-probabilities, if the provider returned them.
        n_tokens: The number of tokens. If None, `tokens` are counted, or the words if there are no tokens.
        finished: False if the answer was cut off at the maximum length.
    """
    if not n_tokens:
        n_tokens = len(tokens) if tokens else len(text.split())
    return Completion(text, tokens, finished, n_tokens)


def parse_logprobs(value: Any) -> tuple[Token, ...] | None:
    """Parse the log-probabilities of an answer in the format of OpenAI.

    Args:
        value: A dict or a pydantic model of the form `{"content": [{"token", "logprob", "top_logprobs"}]}`.

    Returns:
        The tokens, or None if there are no log-probabilities.
    """
    fields = value.model_dump() if hasattr(value, "model_dump") else value
    logprobs = responses.parse_logprobs(fields)
    return tuple(token.as_token() for token in logprobs) if logprobs else None


def _get_user_message(prompt: Prompt) -> str:
    """Return the text of a prompt as a user message.

    Raises:
        UnsupportedSignal: The prompt is a raw text that the LLM must continue.
    """
    if prompt.raw:
        raise UnsupportedSignal(
            "this backend sends chat messages, and cannot let the LLM continue a raw text. Use an openai: or hf: "
            "model instead."
        )
    return prompt.text
