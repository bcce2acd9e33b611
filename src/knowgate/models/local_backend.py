"""Base class for backends that run a model in this process (transformers, llama.cpp and vLLM).

It implements tokenization, generation, streaming, and the checks of prompt lengths and layer numbers.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from knowgate.errors import BadInput, BadSetting
from knowgate.models import tokenization
from knowgate.models.backend import GeneratingBackend
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.models.tools import find_call_token, render_with_tool
from knowgate.types import Model, TextStream, Vector
from knowgate.types.records import Completion, LabelPrompt, Prompt, Signal, SignalRequest, Token

TOKEN_CACHE_SIZE = 4_096  # number of prompts whose token ids are kept
MAX_CACHED_TOKENS = 4_000_000  # of these prompts together: 16 MB, and up to as much again for their texts
ENCODE_LOCK = threading.Lock()  # guards the token ids of recent prompts


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


@dataclass
class GeneratedAnswer:
    """One answer while it is being generated.

    Args:
        tokens: The token ids, without the one that ended the answer.
        steps: Statistics of greedily chosen tokens; empty for sampled answers.
        finished: Whether the model has ended the answer.
        states: Hidden states at the last token that the model has read, by layer.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[TokenStep] = field(default_factory=list)
    finished: bool = False
    states: dict[int, Any] = field(default_factory=dict)

    def cut(self, max_tokens: int) -> GeneratedAnswer:
        """Return a copy with at most `max_tokens` tokens, without hidden states.

        A shortened copy is not finished.
        """
        is_finished = self.finished and len(self.tokens) <= max_tokens
        return GeneratedAnswer(self.tokens[:max_tokens], self.steps[:max_tokens], is_finished)


def get_max_tokens(request: SignalRequest) -> int:
    """Return the maximum length of the requested drafts and samples."""
    return max(request.draft_tokens, request.sample_tokens) if request.samples else request.draft_tokens


class LocalBackend(GeneratingBackend, Model):
    """Base class for backends with direct access to the tokenizer, the logits and the hidden states."""

    offers = frozenset(Signal)  # all signals

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Number of tokens that the model can read at once."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or an object with the same methods."""

    @abstractmethod
    def _start_stream(self, prompt: Prompt, max_tokens: int, resume: object) -> tuple[GeneratedAnswer, Iterator[None]]:
        """Start an answer that grows while the caller iterates.

        With `resume`, the answer begins with a draft.

        Returns:
            The answer, and an iterator. Each step of the iterator adds one token to the answer, in place.
        """

    @abstractmethod
    def _score_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Return the mean log-probability of each answer's tokens after its prompt."""

    @abstractmethod
    def _read_labels(self, prompts: Sequence[LabelPromptTokens], label_ids: Sequence[int]) -> list[Vector]:
        """Return the logits of the labels at each label position, as an array (positions x labels) per prompt."""

    # --- tokenization -----------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.tokenizer.chat_template)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text; `special` adds the special tokens that begin a text, such as BOS."""
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def tokenize_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Tokenize many texts in one call, which uses all cores."""
        if not texts:
            return []
        encoding = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
        return [list(ids) for ids in encoding["input_ids"]]

    def render(self, text: str) -> str:
        """Return the text as a user message in the model's chat template, if there is one."""
        if not self.has_template:
            return text
        if self._fast_template is not None and tokenization.is_plain_text(text):
            return self._fast_template.render(text)
        return self._apply_template(text)

    def _apply_template(self, text: str) -> str:
        content = tokenization.escape_special_tokens(text, self.tokenizer.all_special_tokens)
        messages = [{"role": "user", "content": content}]
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    @functools.cached_property
    def _fast_template(self) -> tokenization.TurnTemplate | None:
        """A fast replacement for the chat template, or None if the template cannot be replaced.

        It suits only messages without markup (`is_plain_text`). A chat template may change markup in a message, such as
        '<think>'.
        """
        tokenizer = self.tokenizer
        return tokenization.extract_fast_template(
            self._apply_template, tokenizer.all_special_tokens, str(tokenizer.chat_template)
        )

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, inside the chat template if there is one.

        Recent prompts are cached.
        """
        cache = self._encoded_prompts
        with ENCODE_LOCK:
            missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in cache]
            for prompt, ids in self._tokenize_prompts(missing).items():
                cache[prompt] = array("i", ids)
            encoded = [cache[prompt].tolist() for prompt in prompts]
            n_tokens = sum(map(len, cache.values()))
            while len(cache) > TOKEN_CACHE_SIZE or n_tokens > MAX_CACHED_TOKENS:
                n_tokens -= len(cache.pop(next(iter(cache))))  # the oldest
        return encoded

    def _tokenize_prompts(self, prompts: Sequence[Prompt]) -> dict[Prompt, list[int]]:
        """Tokenize distinct prompts, with one call for chat prompts and one for raw prompts."""
        chat = [prompt for prompt in prompts if self._is_chat(prompt)]
        raw = [prompt for prompt in prompts if not self._is_chat(prompt)]
        chat_ids = self.tokenize_all([self.render(prompt.text) for prompt in chat])
        raw_ids = self.tokenize_all([prompt.text for prompt in raw], special=True)
        return dict(zip([*chat, *raw], [*chat_ids, *raw_ids], strict=True))

    def _is_chat(self, prompt: Prompt | LabelPrompt) -> bool:
        """Return whether the prompt is put into the chat template."""
        return self.has_template and not prompt.raw

    @functools.cached_property
    def _encoded_prompts(self) -> dict[Prompt, array[int]]:
        """Recent prompts -> their token ids. Arrays of 32-bit integers take less memory than lists."""
        return {}

    def encode_label_prompts(self, prompts: Sequence[LabelPrompt], label_ids: Sequence[int]) -> list[LabelPromptTokens]:
        """Tokenize label prompts so that every label is a separate token.

        A prompt can ask several questions, one in each part. Every later part begins with a label, which answers the
        question before it. Example of parts: 'Is 1 odd?', ' true. Is 2 odd?'.

        Args:
            prompts: The prompts.
            label_ids: First tokens of the labels.

        Raises:
            BadSetting: A chat prompt has several parts, or a later part does not begin with a label.
        """
        chat = [prompt for prompt in prompts if self._is_chat(prompt)]
        if any(len(prompt.parts) > 1 or prompt.prefix for prompt in chat):
            raise BadSetting("a chat prompt must not have several parts or a prefix. Use a prompt with raw=True.")
        prefixes = self._tokenize_prefixes(prompts)
        all_parts = self._tokenize_parts(prompts)
        encoded = []
        for prompt, prefix in zip(prompts, prefixes, strict=True):
            parts = [next(all_parts) for _ in prompt.parts]
            tokens = tokenization.join_label_parts(prefix, parts, label_ids)
            self.check_length(len(tokens.ids), max_tokens=1)
            encoded.append(tokens)
        return encoded

    def _tokenize_prefixes(self, prompts: Sequence[LabelPrompt]) -> list[list[int]]:
        """Tokenize the prefix of each label prompt. Chat prompts have none."""
        distinct = list({prompt.prefix for prompt in prompts})  # many prompts share a prefix
        ids = dict(zip(distinct, self.tokenize_all(distinct, special=True), strict=True))
        return [[] if self._is_chat(prompt) else ids[prompt.prefix] for prompt in prompts]

    def _tokenize_parts(self, prompts: Sequence[LabelPrompt]) -> Iterator[list[int]]:
        """Tokenize the parts of all label prompts in one call, and return their token ids one by one."""
        texts: list[str] = []
        for prompt in prompts:
            texts += map(self.render, prompt.parts) if self._is_chat(prompt) else prompt.parts
        return iter(self.tokenize_all(texts))

    # --- signals ----------------------------------------------------------------------------------

    def _answer_greedily(self, prompts: Sequence[Prompt], max_tokens: int, seed: int | None) -> list[Completion]:
        """Return the greedy answer to each prompt: a draft of at most `max_tokens` tokens."""
        readings = self.read(prompts, SignalRequest(draft_tokens=max_tokens, resumable=False))
        return [reading.draft or Completion("") for reading in readings]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the greedy answer piece by piece, then return a `Completion`.

        With `resume`, the text of a draft comes first.
        """
        answer, steps = self._start_stream(prompt, max_tokens, resume)
        decoder = tokenization.IncrementalDecoder(self.tokenizer)
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
        longest = max(map(len, answer_ids), default=0)
        return self._score_answers(self._encode(prompts, max_tokens=longest), answer_ids)

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return the logits of the labels after each part of each prompt.

        Each array has the shape parts x labels.
        """
        label_ids = tokenization.encode_labels(self.tokenize, labels)
        return self._read_labels(self.encode_label_prompts(prompts, label_ids), label_ids)

    def tool_call_probabilities(self, prompts: Sequence[Prompt], tool: Mapping[str, Any]) -> list[float]:
        """Return the probability that the answer to each prompt begins with a call of the tool.

        Raises:
            UnsupportedSignal: The chat template of the model has no tools.
        """
        if not prompts:
            return []
        tokenizer = self.tokenizer
        special_tokens = tokenizer.all_special_tokens
        texts = [tokenization.escape_special_tokens(prompt.text, special_tokens) for prompt in prompts]
        ids = [self.tokenize(render_with_tool(tokenizer, text, tool, self.name)) for text in texts]
        # The token that begins a call is scored as if it were a whole answer.
        call = [find_call_token(tokenizer, tool, self.name)]
        logprobs = self._score_answers(ids, [call] * len(ids))
        return [math.exp(logprob) for logprob in logprobs]

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return for each prompt whether it fits the context window together with an answer of `max_tokens`."""
        return [len(ids) + max_tokens <= self.context_window for ids in self.encode_all(prompts)]

    def check_length(self, n_tokens: int, max_tokens: int) -> None:
        """Raise BadInput if a prompt of `n_tokens` and an answer of `max_tokens` exceed the context window."""
        if n_tokens + max_tokens > self.context_window:
            raise BadInput(
                f"the prompt ({n_tokens} tokens) and the answer ({max_tokens}) exceed the context window of {self.name}: "
                f"{self.context_window} tokens. Shorten the question, or use fewer or shorter passages."
            )

    def _encode(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Tokenize prompts, and check that each fits the context window with its answer."""
        ids = self.encode_all(prompts)
        for row in ids:
            if not row:
                raise BadInput("the prompt is empty. Ask a question.")
            self.check_length(len(row), max_tokens)
        return ids

    def _make_completion(
        self, answer: GeneratedAnswer, *, with_tokens: bool = False, text: str | None = None
    ) -> Completion:
        """Convert an answer to a completion.

        Args:
            answer: The answer.
            with_tokens: Add the statistics of its tokens.
            text: The decoded tokens; decoded here by default.
        """
        if text is None:
            text = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))
        text = text.strip()
        if not answer.finished:
            text = text.rstrip(tokenization.REPLACEMENT_CHARACTER)  # the limit may cut a character in two
        tokens = tuple(self._make_token(step) for step in answer.steps) if with_tokens else None
        return Completion(text, tokens, answer.finished, len(answer.tokens))

    def _make_token(self, step: TokenStep) -> Token:
        """Convert a step to a token with its text."""
        return Token(self._decode_token(step.token), step.logprob, step.entropy, step.margin)

    @functools.cached_property
    def _decode_token(self) -> Callable[[int], str]:
        """A function that returns the text of a token id. It remembers the texts, because tokens recur often."""
        return functools.cache(lambda token: str(self.tokenizer.decode([token], skip_special_tokens=False)))

    def _sample_layers(self, request: SignalRequest) -> list[int]:
        """Return a list of the layer whose hidden states of samples are requested; empty if there is none."""
        if request.sample_layer is None or not request.samples:
            return []
        return self._resolve_layers([request.sample_layer])

    def _draft_layers(self, request: SignalRequest) -> list[int]:
        """Return the layers whose hidden states at the end of the draft are requested."""
        return self._resolve_layers(request.layers) if request.after_draft else []

    def _resolve_layers(self, layers: Sequence[int]) -> list[int]:
        """Convert negative layer numbers to positive ones.

        Example: in a model with 5 hidden states, [0, -1] becomes [0, 4].
        """
        for layer in layers:
            if not -self.depth <= layer < self.depth:
                raise BadSetting(f"the model {self.name} has no layer {layer}. Use a layer from 0 to {self.depth - 1}.")
        return [layer % self.depth for layer in layers]
