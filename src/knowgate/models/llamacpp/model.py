"""The `llamacpp:FILE.gguf` backend: a GGUF file run by llama.cpp in this process, with all signals.

`engine` holds the weights and the sequences, `decoding` generates tokens. This module turns prompts into sequences and
sequences into readings.

The fingerprint differs from that of `gguf:FILE`: llama.cpp computes with quantized weights and transformers with
dequantized ones, so their signals differ slightly, and a gate fitted on one does not fit the other exactly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.core.files import cached_sha256_file
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting, WeightsError
from knowgate.models.backend import check_resume_handle, check_sampling, draw_uniforms
from knowgate.models.embedded_weights import fetch_verified_file
from knowgate.models.llamacpp import decoding
from knowgate.models.llamacpp.decoding import FIRST_PROMPT_SEQUENCE, EnginePrefixCache, SequenceState
from knowgate.models.llamacpp.engine import MAX_SEQUENCES, EngineTokenizer, InputToken, LlamaEngine, log_softmax
from knowgate.models.local_backend import LocalBackend, get_max_tokens
from knowgate.models.tokenization import LabelPromptTokens, split_positions
from knowgate.types import Completion, Prompt, Reading, Sampling, SignalRequest, Vector

DOWNLOADED_MODEL = "smollm"  # the spec llamacpp:smollm stands for a file that knowgate downloads
MAX_CONCURRENT_TOKENS = 2_048  # of prompts and answers in one pass: attention reads all of them for every sequence


@dataclass(frozen=True)
class LlamaCppModel(LocalBackend):
    """A model in a GGUF file (`llamacpp:FILE.gguf`), loaded on first use, for one thread at a time.

    Args:
        source: The file, or 'smollm' for knowgate's default model.
        lock: Held while the engine is used.
        prefix_cache: Prompt prefixes in the engine's cache.
    """

    source: str
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    prefix_cache: EnginePrefixCache = field(default_factory=EnginePrefixCache, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The spec of the model."""
        return f"llamacpp:{self.source}"

    @functools.cached_property
    def file(self) -> Path:
        """The GGUF file. That of 'smollm' is downloaded on first use."""
        file = fetch_verified_file(DOWNLOADED_MODEL) if self.source == DOWNLOADED_MODEL else expand_path(self.source)
        if not file.is_file():
            raise WeightsError(f"the GGUF file '{file}' does not exist. Check the path, or see: knowgate models")
        return file

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash that identifies the file. Fitted gates store it, because they are valid only for this model."""
        return f"llamacpp-{cached_sha256_file(self.file)[:16]}"

    @functools.cached_property
    def engine(self) -> LlamaEngine:
        """The loaded engine, after its self-test."""
        return LlamaEngine(self.file)

    @functools.cached_property
    def tokenizer(self) -> EngineTokenizer:
        """The tokenizer and chat template in the file."""
        return EngineTokenizer(self.engine)

    @property
    def depth(self) -> int:
        """Number of hidden states: the embeddings and each layer's output."""
        return self.engine.depth

    @property
    def context_window(self) -> int:
        """Number of tokens that the model can read at once."""
        return self.engine.cells

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of each prompt. Prompts of similar length are computed together."""
        if request.samples:
            check_sampling(request.sampling)
        max_tokens = get_max_tokens(request)
        readings: dict[int, Reading] = {}
        with self.lock:
            ids = self._encode(prompts, max_tokens)
            for group in self._group_prompts([len(row) for row in ids], request.samples, max_tokens):
                results = self._read_group([prompts[i] for i in group], [ids[i] for i in group], request)
                readings |= dict(zip(group, results, strict=True))
        return [readings[i] for i in range(len(prompts))]

    def _read_labels(self, prompts: Sequence[LabelPromptTokens], label_ids: Sequence[int]) -> list[Vector]:
        """Return the logits of the labels at each label position, as an array (positions x labels) per prompt."""
        logits: dict[int, Vector] = {}
        with self.lock:
            for group in self._group_prompts([len(prompt.ids) for prompt in prompts], samples=0, max_tokens=1):
                members = [prompts[i] for i in group]
                ids = [prompt.ids for prompt in members]
                outputs = [prompt.positions for prompt in members]
                values, _ = self._prefill(ids, layers=(), n_tokens=sum(map(len, ids)), outputs=outputs)
                results = split_positions(values[:, list(label_ids)], members)
                logits |= dict(zip(group, results, strict=True))
        return [logits[i] for i in range(len(prompts))]

    def _score_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Return the mean log-probability of the tokens of each answer after its prompt."""
        scores = []
        for ids, answer in zip(prompts, answers, strict=True):
            # The logits after each token predict the next one, so those after the answer's last token are not needed.
            tokens = [*ids, *answer[:-1]]
            outputs = range(len(ids) - 1, len(tokens))  # from the prompt's last token to the answer's last but one
            with self.lock:
                logits, _ = self._prefill([tokens], layers=(), n_tokens=len(tokens), outputs=[outputs])
            logp = log_softmax(logits)
            scores.append(float(np.mean([logp[step, token] for step, token in enumerate(answer)])))
        return scores

    # --- reading ----------------------------------------------------------------------------------

    def _group_prompts(self, lengths: Sequence[int], samples: int, max_tokens: int) -> list[list[int]]:
        """Return groups of prompt indices, so that each group fits the engine's cache.

        Prompts of similar length share a group.

        Args:
            lengths: Number of tokens of each prompt.
            samples: Number of samples per prompt.
            max_tokens: Maximum number of tokens per answer.
        """
        sequences_per_prompt = 1 + samples  # one for the draft, and one for each sample
        n_available = MAX_SEQUENCES - FIRST_PROMPT_SEQUENCE
        if sequences_per_prompt > n_available:
            raise BadSetting(f"samples={samples} is too many for a model llamacpp:FILE. Use at most {n_available - 1}.")
        max_prompts = n_available // sequences_per_prompt  # per group
        max_group_tokens = min(MAX_CONCURRENT_TOKENS, self.context_window)
        sizes = [length + sequences_per_prompt * max_tokens for length in lengths]
        return _group_by_size(sizes, max_group_tokens, max_prompts)

    def _read_group(self, prompts: Sequence[Prompt], ids: list[list[int]], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of prompts that are computed together. `ids` are their tokens."""
        # The engine's cache must have room for the prompts and all of their answers.
        n_prompt_tokens = sum(len(tokens) for tokens in ids)
        n_answer_tokens = len(ids) * (request.draft_tokens + request.samples * request.sample_tokens)
        layers = sorted({*self._resolve_layers(request.layers), *self._sample_layers(request)})
        logits, layer_states = self._prefill(ids, layers, n_prompt_tokens + n_answer_tokens)
        states = [{layer: block[i] for layer, block in layer_states.items()} for i in range(len(ids))]
        drafts = self._start_drafts(ids, states, request.draft_tokens)
        samples = self._start_samples(drafts, prompts, request)
        self._decode(drafts, samples, logits, request)
        n = request.samples
        prompt_samples = [samples[i * n : (i + 1) * n] for i in range(len(drafts))]
        parts = zip(drafts, states, prompt_samples, strict=True)
        return [self._make_reading(draft, end_states, drawn, request) for draft, end_states, drawn in parts]

    def _start_drafts(
        self, ids: list[list[int]], states: Sequence[dict[int, Vector]], max_tokens: int
    ) -> list[SequenceState]:
        """Return an empty draft for each prompt that the model has just read."""
        drafts = []
        for i, prompt in enumerate(ids):
            draft = SequenceState(prompt=prompt, sequence=FIRST_PROMPT_SEQUENCE + i, limit=max_tokens, states=states[i])
            draft.prefill_number = self.prefix_cache.n_prefills  # the prefill that has just read the prompt
            drafts.append(draft)
        return drafts

    def _decode(
        self, drafts: list[SequenceState], samples: list[SequenceState], logits: Vector, request: SignalRequest
    ) -> None:
        """Extend empty drafts and samples as one batch, and store the requested hidden states in them.

        `logits` are those after each prompt.
        """
        draft_layers = self._draft_layers(request)
        sample_layers = self._sample_layers(request)
        layers = sorted({*draft_layers, *sample_layers})
        first_logits = np.concatenate([logits, np.repeat(logits, request.samples, axis=0)])
        answers = [*drafts, *samples]
        decoding.complete_answers(self.engine, answers, first_logits, request.sampling, layers)
        if draft_layers:
            self._read_ends(drafts, layers, read_end_token=False)
        if sample_layers:
            self._read_ends(samples, layers, read_end_token=request.sample_end)

    def _make_reading(
        self, draft: SequenceState, states: dict[int, Vector], samples: list[SequenceState], request: SignalRequest
    ) -> Reading:
        """Make the reading of one prompt. `states` are those at the end of the prompt, by layer."""
        layers_after = request.layers if request.after_draft else ()
        sample_states = [sample.states[layer] for layer in self._sample_layers(request) for sample in samples]
        return Reading(
            draft=self._make_completion(draft, with_tokens=True) if request.draft_tokens else None,
            # Negative layer numbers in the request count from the end. The modulo makes them positive.
            hidden={layer: states[layer % self.depth] for layer in request.layers},
            hidden_after={layer: draft.states[layer % self.depth] for layer in layers_after},
            samples=tuple(self._make_completion(sample) for sample in samples),
            resume=draft if request.resumable else None,
            sample_states=np.stack(sample_states) if sample_states else None,
        )

    def _prefill(
        self, ids: Sequence[list[int]], layers: Sequence[int], n_tokens: int, outputs: Sequence[Sequence[int]] = ()
    ) -> tuple[Vector, dict[int, Vector]]:
        """Let the model read prompts in parallel, each in its own sequence of the engine.

        Beginnings in the prefix cache are skipped. The first prompt gets FIRST_PROMPT_SEQUENCE, the others the sequences
        after it.

        Args:
            ids: Token ids of each prompt.
            layers: Layers whose hidden states are returned.
            n_tokens: Number of tokens to make room for: those of the prompts and of their future answers.
            outputs: Positions in each prompt whose logits and states are returned; by default the last position.

        Returns:
            The logits (positions x vocabulary), and the hidden states by layer (positions x width).
        """
        positions = [set(prompt_outputs) for prompt_outputs in outputs] or [{len(tokens) - 1} for tokens in ids]
        # Cached tokens have no output, so only tokens before the first output are taken from the cache.
        first_output = min(min(prompt_positions) for prompt_positions in positions)
        reused = self.prefix_cache.start(self.engine, ids, n_tokens=n_tokens, max_length=first_output)
        inputs: list[InputToken] = []
        for row, tokens in enumerate(ids):
            inputs += _list_unread_tokens(tokens, reused, FIRST_PROMPT_SEQUENCE + row, positions[row])
        result = self.engine.feed(inputs, layers)
        if len(ids) == 1:
            self.prefix_cache.keep(self.engine, ids[0], reused)
        return result

    def _start_samples(
        self, drafts: Sequence[SequenceState], prompts: Sequence[Prompt], request: SignalRequest
    ) -> list[SequenceState]:
        """Create empty samples. Each gets a copy of its prompt's sequence in the engine."""
        first_sequence = FIRST_PROMPT_SEQUENCE + len(drafts)  # after those of the drafts
        samples: list[SequenceState] = []
        for draft, prompt in zip(drafts, prompts, strict=True):
            for uniforms in draw_uniforms(prompt, request):
                sample = draft.copy(request.sample_tokens)
                sample.uniforms = uniforms
                sample.sequence = first_sequence + len(samples)
                self.engine.copy(draft.sequence, sample.sequence, draft.length)
                samples.append(sample)
        return samples

    def _read_ends(self, answers: Sequence[SequenceState], layers: Sequence[int], *, read_end_token: bool) -> None:
        """Let the model read the last token of each answer, and store the hidden states there.

        Generation leaves the last token that it has chosen unread. With `read_end_token`, this includes the end tokens of
        finished answers. Empty answers keep the states of their prompt.
        """
        not_empty = [answer for answer in answers if answer.tokens or answer.finished]
        unread = [answer for answer in not_empty if read_end_token or not answer.finished]
        if unread:
            decoding.feed_last_tokens(self.engine, unread, layers, read_end_token=read_end_token)

    # --- continuing a draft -----------------------------------------------------------------------

    def _start_stream(self, prompt: Prompt, max_tokens: int, resume: object) -> tuple[SequenceState, Iterator[None]]:
        """Return the state of an answer, and an iterator that adds one token per step.

        With `resume`, the answer begins with a draft.
        """
        if resume is not None:
            answer = check_resume_handle(resume, SequenceState).copy(max_tokens)
        else:
            ids = self._encode([prompt], max_tokens)[0]
            answer = SequenceState(prompt=ids, sequence=FIRST_PROMPT_SEQUENCE, limit=max_tokens)
        return answer, self._iter_steps(answer)

    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts (beginnings of answers) one after another, and return the whole answers."""
        answers = [check_resume_handle(handle, SequenceState).copy(max_tokens) for handle in handles]
        for answer in answers:
            for _ in self._iter_steps(answer):  # each step adds one token to the answer
                pass
        return [self._make_completion(answer, with_tokens=True) for answer in answers]

    def _iter_steps(self, answer: SequenceState) -> Iterator[None]:
        """Extend an answer in place, yielding after each token.

        Other calls may use the engine in between.
        """
        while not answer.is_complete:
            with self.lock:
                logits = self._compute_next_logits(answer)
                # The answer is greedy, so the sampling options have no effect.
                decoding.choose_tokens([answer], logits, Sampling(), self.engine)
            yield

    def _compute_next_logits(self, answer: SequenceState) -> Vector:
        """Return the logits of the next token of an answer.

        Prompt and answer are read again if the engine lost them.
        """
        # Each prefill removes the earlier prompts and answers from the engine.
        is_in_engine = answer.prefill_number == self.prefix_cache.n_prefills
        if not is_in_engine or not answer.tokens:
            n_tokens = len(answer.prompt) + answer.limit
            logits, _ = self._prefill([[*answer.prompt, *answer.tokens]], layers=(), n_tokens=n_tokens)
            answer.sequence = FIRST_PROMPT_SEQUENCE
            answer.prefill_number = self.prefix_cache.n_prefills
            return logits
        # The engine keeps no logits, so the model reads the last token (again) to get those after it.
        answer.length = len(answer.prompt) + len(answer.tokens) - 1
        self.engine.truncate(answer.sequence, answer.length)
        return decoding.feed_last_tokens(self.engine, [answer])


def _list_unread_tokens(tokens: list[int], start: int, sequence: int, outputs: set[int]) -> list[InputToken]:
    """List the tokens of a prompt from index `start` on. Those at the positions `outputs` need output."""
    unread = range(start, len(tokens))
    return [InputToken(tokens[position], position, sequence, position in outputs) for position in unread]


def _group_by_size(sizes: Sequence[int], max_size: int, max_count: int) -> list[list[int]]:
    """Group the indices of items, smallest first, so that no group exceeds the limits.

    An item larger than `max_size` forms its own group.
    """
    groups: list[list[int]] = []
    group_size = 0  # of the last group
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        if not groups or group_size + sizes[index] > max_size or len(groups[-1]) == max_count:
            groups.append([])
            group_size = 0
        groups[-1].append(index)
        group_size += sizes[index]
    return groups
