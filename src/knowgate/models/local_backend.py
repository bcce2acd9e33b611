"""Base class for backends that run a model in this process (transformers, llama.cpp and vLLM).

It implements generation, streaming, and the checks of prompt lengths and layer numbers.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from knowgate.errors import BadInput, BadSetting
from knowgate.models.backend import Backend, check_resume_options
from knowgate.models.tokenization import REPLACEMENT_CHARACTER, IncrementalDecoder, LocalTokenizer
from knowgate.types import Completion, Prompt, Reading, Sampling, Signal, SignalRequest, TextStream, Token


@dataclass(frozen=True)
class TokenStep:
    """A greedily chosen token, with statistics of the distribution over all tokens at its position.

    Args:
        token: The token id.
        logprob: Log-probability of the chosen token.
        entropy: Entropy of the distribution in nats; None if the engine lists too few tokens to compute it.
        margin: Probability of the most probable token minus that of the second.
    """

    token: int
    logprob: float
    entropy: float | None
    margin: float | None


class GeneratedTokens(Protocol):
    """An answer that is being generated.

    `tokens` are the token ids so far, `steps` their statistics (empty for sampled answers), and `finished` tells whether
    the model has ended the answer.
    """

    @property
    def tokens(self) -> list[int]: ...
    @property
    def steps(self) -> list[TokenStep]: ...
    @property
    def finished(self) -> bool: ...


class LocalBackend(Backend, LocalTokenizer):
    """Base class for backends with direct access to the tokenizer, the logits and the hidden states."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The spec of the model."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of hidden states: the embeddings and each layer's output."""

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Number of tokens that the model can read at once."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """An object with the decoding methods of a transformers tokenizer."""

    @abstractmethod
    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return a reading of each prompt: the requested signals, such as a draft, samples and hidden states."""

    @abstractmethod
    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts greedily until they end or have `max_tokens` tokens, including those of the draft."""

    @abstractmethod
    def _start_stream(self, prompt: Prompt, max_tokens: int, resume: object) -> tuple[GeneratedTokens, Iterator[None]]:
        """Start an answer that grows while the caller iterates.

        With the handle of a draft as `resume`, the answer begins with that draft. With None, it is empty at first. A
        backend that cannot stream returns the complete answer and an empty iterator.

        Returns:
            The answer, and an iterator. Each step of the iterator adds one token to the answer, in place.
        """

    @abstractmethod
    def _score_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Return the mean log-probability of each answer's tokens after its prompt."""

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, inside the model's chat template if it has one."""
        chat = [prompt for prompt in prompts if self.has_template and not prompt.raw]
        raw = [prompt for prompt in prompts if prompt.raw or not self.has_template]
        chat_ids = self.tokenize_all([self.render(prompt.text) for prompt in chat])
        raw_ids = self.tokenize_all([prompt.text for prompt in raw], special=True)
        ids = dict(zip([*chat, *raw], [*chat_ids, *raw_ids], strict=True))
        return [ids[prompt] for prompt in prompts]

    @property
    def offers(self) -> frozenset[Signal]:
        """The signals that the model supports: all of them."""
        return frozenset(Signal)

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
        """Return `n` completions per prompt; with `resume`, continue the drafts of earlier readings instead."""
        if resume is not None:
            check_resume_options(temperature, n)
            return [[completion] for completion in self._continue_drafts(resume, max_tokens)]
        if temperature == 0:
            readings = self.read(prompts, SignalRequest(draft_tokens=max_tokens, resumable=False))
            return [[reading.draft or Completion("")] * n for reading in readings]
        request = SignalRequest(
            samples=n, sample_tokens=max_tokens, sampling=Sampling(temperature), seed=seed, resumable=False
        )
        return [list(reading.samples) for reading in self.read(prompts, request)]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the greedy answer piece by piece, then return it as a `Completion`.

        A piece is yielded as soon as its characters are complete. The text of a resumed draft comes first.
        """
        answer, steps = self._start_stream(prompt, max_tokens, resume)
        decoder = IncrementalDecoder(self.tokenizer)
        if piece := decoder.take(answer.tokens):
            yield piece
        for _ in steps:
            if piece := decoder.take(answer.tokens):
                yield piece
        completion = self._make_completion(answer, with_tokens=True)
        if piece := decoder.finish(completion.text):
            yield piece
        return completion

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Return the mean log-probability of each answer's tokens, given its prompt.

        Raises:
            BadInput: An answer is empty, or a prompt with its answer exceeds the context window.
        """
        answer_ids = [self.tokenize(answer.strip()) for answer in answers]
        if not all(answer_ids):
            raise BadInput("cannot compute the log-probability of an empty answer. Leave out empty answers.")
        prompt_ids = self._encode(prompts, max(map(len, answer_ids), default=0))
        return self._score_answers(prompt_ids, answer_ids)

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return for each prompt whether it fits the context window together with an answer of `max_tokens`."""
        return [len(ids) + max_tokens <= self.context_window for ids in self.encode_all(prompts)]

    def check_length(self, n_tokens: int, max_tokens: int) -> None:
        """Raise BadInput if a prompt of `n_tokens` and an answer of `max_tokens` exceed the context window."""
        if n_tokens + max_tokens > self.context_window:
            raise BadInput(
                f"the prompt has {n_tokens} tokens and the answer may have {max_tokens}, but the context window of "
                f"{self.name} has only {self.context_window}. Shorten the question, or use fewer or shorter passages."
            )

    def _encode(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Tokenize prompts; raises BadInput if one is empty or leaves no room for `max_tokens` in the context window."""
        ids = self.encode_all(prompts)
        for row in ids:
            if not row:
                raise BadInput("the prompt is empty. Ask a question.")
            self.check_length(len(row), max_tokens)
        return ids

    def _make_completion(self, answer: GeneratedTokens, *, with_tokens: bool) -> Completion:
        """Decode an answer to text; with `with_tokens`, add the statistics of its tokens."""
        text = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True)).strip()
        if not answer.finished:
            text = text.rstrip(REPLACEMENT_CHARACTER)  # the limit may cut a character in two
        tokens = None
        if with_tokens:
            tokens = tuple(
                Token(self._decode_token(step.token), step.logprob, step.entropy, step.margin) for step in answer.steps
            )
        return Completion(text, tokens, answer.finished, len(answer.tokens))

    @functools.cached_property
    def _decode_token(self) -> Callable[[int], str]:
        return functools.cache(lambda token: str(self.tokenizer.decode([token], skip_special_tokens=False)))

    def _sample_layers(self, request: SignalRequest) -> list[int]:
        """Return the layer whose hidden states at the ends of the samples are requested, as a list; empty if none is."""
        if request.sample_layer is None or not request.samples:
            return []
        return self._resolve_layers([request.sample_layer])

    def _resolve_layers(self, layers: Sequence[int]) -> list[int]:
        """Convert negative layer numbers, which count from the end; raises BadSetting if a layer does not exist.

        In a model with 5 hidden states, [0, -1] becomes [0, 4].
        """
        for layer in layers:
            if not -self.depth <= layer < self.depth:
                raise BadSetting(
                    f"{self.name} has no layer {layer}. Its layers are 0 to {self.depth - 1}; negative numbers count "
                    "from the end."
                )
        return [layer % self.depth for layer in layers]
