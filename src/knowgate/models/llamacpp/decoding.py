"""Generate answers in parallel with llama.cpp, and reuse the computation of prefixes that prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.models.llamacpp.engine import InputToken, LlamaEngine, log_softmax
from knowgate.models.local_backend import GeneratedAnswer, TokenStep
from knowgate.models.tokenization import count_common_tokens, find_common_prefix
from knowgate.types import Sampling, Vector

# The engine's sequences below this one hold cached prefixes: a few, because a few kinds of prompts alternate. Prompts and
# answers are in this sequence and those after it.
FIRST_PROMPT_SEQUENCE = 4
MIN_PREFIX_TOKENS = 16
MAX_PREFIX_TOKENS = 256  # kept of a single prompt, which may not come again; attention reads them for every sequence
MIN_REUSE_SHARE = 0.75  # of the shared tokens: a cached prefix this long is used as it is


# --- answers --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SequenceState(GeneratedAnswer):
    """One answer while it is generated, and the place of its tokens in the engine.

    Args:
        prompt: Token ids of the prompt.
        sequence: Number of the sequence in the engine's key-value cache that holds prompt and answer.
        limit: Maximum number of answer tokens.
        uniforms: Random numbers from 0 to 1, one for each token to draw; None to choose the most probable tokens.
        end: The token that ended the answer; None if it has not ended.
        prefill_number: Number of the prefill (forward pass over prompts) that read the prompt; -1 if it was not read yet.
            The next prefill removes the sequence from the engine. Then prompt and answer must be read again.
        length: Number of tokens of prompt and answer that the model has read: all of them, or all but the newest one.
    """

    prompt: list[int]
    sequence: int
    limit: int
    uniforms: NDArray[np.float64] | None = None
    end: int | None = None
    prefill_number: int = -1
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt)

    def copy(self, limit: int) -> SequenceState:
        """Return a copy of the answer, cut to at most `limit` tokens.

        An unfinished copy can be extended up to the limit.
        """
        cut = self.cut(limit)
        end = self.end if cut.finished else None  # a shortened answer has not ended
        return replace(self, tokens=cut.tokens, steps=cut.steps, finished=cut.finished, limit=limit, end=end)

    @property
    def is_complete(self) -> bool:
        """Whether no more tokens follow."""
        return self.finished or len(self.tokens) >= self.limit


def complete_answers(
    engine: LlamaEngine, answers: list[SequenceState], logits: Vector, sampling: Sampling, layers: Sequence[int] = ()
) -> None:
    """Extend all answers until they are complete.

    The last token of each answer stays unread, because no further token is chosen after it.

    Args:
        engine: The engine.
        answers: The answers, extended in place.
        logits: Logits of the first token to add to each answer (answers x vocabulary).
        sampling: How tokens are drawn.
        layers: Layers whose hidden states are stored in the answers.
    """
    incomplete = [answer for answer in answers if not answer.is_complete]
    logits = logits[np.array([not answer.is_complete for answer in answers], dtype=bool)]
    while incomplete:
        choose_tokens(incomplete, logits, sampling, engine)
        incomplete = [answer for answer in incomplete if not answer.is_complete]
        if incomplete:
            logits = feed_last_tokens(engine, incomplete, layers)


def feed_last_tokens(
    engine: LlamaEngine, answers: Sequence[SequenceState], layers: Sequence[int] = (), *, read_end_token: bool = False
) -> Vector:
    """Let the model read the last token of each answer, and return the logits of the next token.

    The hidden states of `layers` are stored in the answers. With `read_end_token`, the token that ended an answer counts as
    the answer's last token.
    """
    inputs = []
    for answer in answers:
        token = answer.end if read_end_token and answer.end is not None else answer.tokens[-1]
        inputs.append(InputToken(token, position=answer.length, sequence=answer.sequence, needs_output=True))
    logits, states = engine.feed(inputs, layers)
    for number, answer in enumerate(answers):
        answer.length += 1
        answer.states = {layer: states[layer][number] for layer in layers}
    return logits


def choose_tokens(answers: Sequence[SequenceState], logits: Vector, sampling: Sampling, engine: LlamaEngine) -> None:
    """Append the next token to each answer, or mark the answer as finished if the token is an end token.

    Answers with random numbers (`uniforms`) are sampled. Answers without them are greedy. `logits` are answers x vocabulary.
    """
    for answer, answer_logits in zip(answers, logits, strict=True):
        token, steps = _choose_token(answer, answer_logits, sampling)
        if engine.is_end(token):
            answer.end = token
            answer.finished = True
        else:
            answer.tokens.append(token)
            answer.steps += steps


def _choose_token(answer: SequenceState, logits: Vector, sampling: Sampling) -> tuple[int, list[TokenStep]]:
    """Return the next token of an answer, and a list of its statistics. The list is empty for a drawn token."""
    if answer.uniforms is None:  # a greedy answer needs no random numbers
        step = pick_greedy_step(logits)
        return step.token, [step]
    uniform = float(answer.uniforms[len(answer.tokens)])
    return draw_token(logits, uniform, sampling), []


def pick_greedy_step(logits: Vector) -> TokenStep:
    """Return the most probable next token, with its log-probability, entropy and margin."""
    logp = log_softmax(logits)
    probabilities = np.exp(logp)
    # A forbidden token has p = 0 and log p = -inf. It adds nothing to the entropy.
    finite_logp = np.where(probabilities > 0, logp, 0)
    entropy = -(probabilities * finite_logp).sum()
    second, first = np.partition(probabilities, -2)[-2:]
    token = int(logp.argmax())
    return TokenStep(token, float(logp[token]), float(entropy), margin=float(first - second))


def draw_token(logits: Vector, uniform: float, sampling: Sampling) -> int:
    """Draw the next token by inverse transform sampling.

    Args:
        logits: Logits of the next token.
        uniform: A random number from 0 to 1, which determines the token.
        sampling: Temperature, top_p and top_k.
    """
    scaled = (logits / np.float32(sampling.temperature)).astype(np.float32)
    probabilities = np.exp(log_softmax(scaled))
    if sampling.keeps_all_tokens:  # neither top_k nor top_p excludes tokens
        return _invert_cdf(probabilities, uniform)
    return _draw_from_top(probabilities, uniform, sampling)


def _invert_cdf(probabilities: Vector, uniform: float) -> int:
    """Return the first index with a cumulative probability above the uniform number."""
    cumulative = np.cumsum(probabilities, dtype=np.float32)
    index = np.searchsorted(cumulative, np.float32(uniform) * cumulative[-1], side="right")
    return int(min(index, len(probabilities) - 1))


def _draw_from_top(probabilities: Vector, uniform: float, sampling: Sampling) -> int:
    """Draw a token with a uniform random number, after applying top_k and top_p to the probabilities."""
    n_kept = sampling.top_k or len(probabilities)  # top_k=0 means no limit
    tokens = np.argsort(-probabilities, kind="stable")[:n_kept]  # most probable first
    top = probabilities[tokens]
    if sampling.top_k:
        top = top / top.sum()  # top_p is a share of what top_k leaves
    # A token is kept if the tokens before it do not reach top_p yet.
    is_kept = np.cumsum(top) - top < sampling.top_p
    is_kept[0] = True  # sums are rounded; the most probable token always stays
    last_kept = int(is_kept.sum()) - 1
    index = _invert_cdf(top * is_kept, uniform)
    return int(tokens[min(index, last_kept)])


# --- shared prefixes ------------------------------------------------------------------------------


class CachedPrefix(NamedTuple):
    """Where the engine holds the beginning of a prompt that it has already computed.

    Args:
        sequence: Number of the engine's sequence that begins with the same tokens as the prompt.
        length: Number of these tokens; 0 for none.
    """

    sequence: int
    length: int


NO_PREFIX = CachedPrefix(0, 0)


@dataclass
class EnginePrefixCache:
    """Cache of prompt prefixes in the first sequences of an engine.

    Many prompts begin with the same instruction. The model reads such a prefix only once.

    Args:
        prefixes: Sequence number -> its tokens; the one used last is at the end.
        times_cleared: How often the engine had been cleared when the prefixes were computed.
        n_prefills: Number of prefills (forward passes over prompts) so far. Each prefill replaces the prompts and answers
            of the one before, so this number tells whether the engine still holds a draft.
    """

    prefixes: dict[int, list[int]] = field(default_factory=dict)
    times_cleared: int = 0
    n_prefills: int = 0

    def start(self, engine: LlamaEngine, ids: Sequence[list[int]], *, n_tokens: int, max_length: int) -> int:
        """Remove earlier prompts from the engine, and start each new prompt with a cached prefix that all prompts share.

        Args:
            engine: The engine.
            ids: Token ids of each prompt.
            n_tokens: Number of tokens to make room for: those of the prompts and of their future answers. If the
                engine has no room for them beside the cached prefixes, the cache is cleared.
            max_length: Maximum number of tokens to take from the cache.

        Returns:
            How many tokens at the start of each prompt came from the cache. The model need not read them again.
        """
        self.n_prefills += 1
        self._make_room(engine, n_tokens)
        prefix = self._find_prefix(engine, ids)
        length = min(prefix.length, max_length)
        if length:
            self.prefixes[prefix.sequence] = self.prefixes.pop(prefix.sequence)  # moves it to the end: used last
            for index in range(len(ids)):
                engine.copy(prefix.sequence, FIRST_PROMPT_SEQUENCE + index, length)
        return length

    def _make_room(self, engine: LlamaEngine, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens: remove earlier prompts and answers from the engine.

        Cached prefixes are removed only if more room is needed.
        """
        n_cached = sum(map(len, self.prefixes.values()))
        was_cleared = self.times_cleared != engine.times_cleared  # then the engine no longer holds the prefixes
        has_room = n_cached + n_tokens <= engine.cells
        if was_cleared or not has_room:
            self.prefixes.clear()
            engine.clear()
            self.times_cleared = engine.times_cleared
        for sequence in list(engine.filled):
            if sequence not in self.prefixes:  # an earlier prompt or answer, or a prefix that was not completed
                engine.truncate(sequence)

    def keep(self, engine: LlamaEngine, tokens: list[int], reused: int) -> None:
        """Cache the beginning of a new prompt.

        Short prompts, and prompts taken mostly from the cache, are skipped.

        Args:
            engine: The engine, which holds the prompt in FIRST_PROMPT_SEQUENCE.
            tokens: Token ids of the prompt.
            reused: How many tokens at its start came from the cache.
        """
        n_reusable = len(tokens) - 1  # the model has to read the last token anyway, to return logits
        if reused < MIN_REUSE_SHARE * n_reusable and len(tokens) > MIN_PREFIX_TOKENS:
            sequence = self._free_sequence(engine)
            prefix = tokens[:MAX_PREFIX_TOKENS]
            engine.copy(FIRST_PROMPT_SEQUENCE, sequence, len(prefix))
            self.prefixes[sequence] = prefix

    def _find_prefix(self, engine: LlamaEngine, ids: Sequence[list[int]]) -> CachedPrefix:
        """Return the longest cached prefix that all prompts share, or NO_PREFIX.

        If the prompts share many more tokens, these are cached as a new prefix first.
        """
        shared = find_common_prefix(ids)
        candidates = [
            CachedPrefix(sequence, count_common_tokens(tokens, shared)) for sequence, tokens in self.prefixes.items()
        ]
        best = max(candidates, key=lambda prefix: prefix.length, default=NO_PREFIX)
        covers_little = best.length < MIN_REUSE_SHARE * len(shared)
        if len(ids) > 1 and len(shared) >= MIN_PREFIX_TOKENS and covers_little:
            return self._extend(engine, best, shared)
        return best if best.length >= MIN_PREFIX_TOKENS else NO_PREFIX

    def _extend(self, engine: LlamaEngine, best: CachedPrefix, shared: list[int]) -> CachedPrefix:
        """Cache the tokens that prompts share as a new prefix, and return it.

        Args:
            engine: The engine.
            best: The cached prefix with the most of the shared tokens. Only the other shared tokens are computed.
            shared: The shared tokens.
        """
        sequence = self._free_sequence(engine, excluding=best.sequence)
        if best.length:
            engine.copy(best.sequence, sequence, best.length)
        missing = range(best.length, len(shared))
        engine.feed([InputToken(shared[position], position, sequence) for position in missing])
        self.prefixes[sequence] = shared
        return CachedPrefix(sequence, len(shared))

    def _free_sequence(self, engine: LlamaEngine, excluding: int = -1) -> int:
        """Return an empty sequence, evicting the least recently used prefix if necessary.

        The sequence `excluding` is never evicted.
        """
        empty = [sequence for sequence in range(FIRST_PROMPT_SEQUENCE) if sequence not in self.prefixes]
        evictable = [sequence for sequence in self.prefixes if sequence != excluding]  # least recently used first
        sequence = [*empty, *evictable][0]
        self.prefixes.pop(sequence, None)
        engine.truncate(sequence)
        return sequence
