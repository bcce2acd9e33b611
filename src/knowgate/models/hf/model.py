"""The `hf:` backend: any causal LLM that transformers can load, on CPU or CUDA, with all signals.

`local_model` holds the weights and the tokenizer, `decoding` generates tokens. This module turns prompts into batches and
generated rows into readings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from knowgate.models import tokenization
from knowgate.models.backend import check_resume_handle, check_sampling, draw_uniforms
from knowgate.models.hf.batching import BatchLimits, make_nan_error, split_into_batches
from knowgate.models.hf.decoding import DecodingBatch, decode_greedily, iter_greedy_steps, prefill, sample_rows
from knowgate.models.hf.forward_pass import supports_partial_pass
from knowgate.models.hf.local_model import LocalModel, compute_mean_logprobs, read_label_logits
from knowgate.models.hf.shared_decoding import DraftsAndSamples, SharedGeneration, join_prefills
from knowgate.models.local_backend import GeneratedAnswer, LocalBackend, get_max_tokens
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.types import Completion, Prompt, Reading, SignalRequest, Vector

AnswerCollector = Callable[[], DraftsAndSamples]  # returns the answers of a batch, without using the GPU


@dataclass(frozen=True)
class HFResumeHandle:
    """The state of a draft, kept for continuing the draft later.

    A handle can be used several times.

    Args:
        batch: The batch that the prompt was read in. It holds the keys and values of all unfinished drafts.
        row: Number of the draft's row in the batch; None for a finished draft, because the batch has no row for it.
        answer: The tokens of the draft so far.
    """

    batch: DecodingBatch = field(repr=False)
    row: int | None
    answer: GeneratedAnswer

    def can_grow(self, max_tokens: int) -> bool:
        """Return whether the draft is unfinished and has fewer than `max_tokens` tokens."""
        return self.row is not None and len(self.answer.tokens) < max_tokens

    def copy(self, max_tokens: int) -> HFResumeHandle:
        """Return a handle for a copy of the draft's first `max_tokens` tokens, in a batch without other prompts."""
        answer = self.answer.cut(max_tokens)
        if self.row is None:  # a finished draft is not continued, so its batch need not be copied
            return HFResumeHandle(self.batch, None, answer)
        return HFResumeHandle(self.batch.copy([self.row]), 0, answer)


@dataclass(frozen=True)
class HFModel(LocalModel, LocalBackend):
    """A transformers model from a hub name or a folder (`hf:NAME_OR_DIR`).

    Use the model from one thread at a time. Other calls may run between two tokens of a stream.

    Example:
        >>> model = HFModel("HuggingFaceTB/SmolLM2-135M-Instruct")  # nothing is loaded yet
        >>> sorted(model.offers)
        ['draft', 'hidden', 'labels', 'logprobs', 'samples', 'tools']
    """

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of each prompt, such as the draft and hidden states."""
        ids = self._encode(prompts, get_max_tokens(request))
        pass_limits = batch_limits = self.compute_limits()
        if self._can_join_prefills(request):  # several forward passes fill a batch, so only the cache limits its size
            batch_limits = replace(pass_limits, prompt_tokens=pass_limits.cached_tokens)

        def start_batch(indices: list[int]) -> list[tuple[Future[list[Reading]], int]]:
            """Answer some prompts. A thread makes their readings while the GPU works on the next batch.

            Returns for each prompt a future of the readings of all these prompts, and the index of its own reading.
            """
            batch = self._prefill([ids[i] for i in indices], request, pass_limits)
            make_readings = self._answer_batch(batch, [prompts[i] for i in indices], request)
            readings = thread.submit(make_readings)
            return [(readings, index) for index in range(len(indices))]

        with ThreadPoolExecutor(1, "knowgate-read") as thread:
            started = self.run_batched(ids, start_batch, max(1, request.samples), batch_limits)
            return [readings.result()[index] for readings, index in started]

    def _read_labels(self, prompts: Sequence[LabelPromptTokens], label_ids: Sequence[int]) -> list[Vector]:
        """Return the logits of the labels at each label position, as an array (positions x labels) per prompt."""
        return self.run_batched(
            [prompt.ids for prompt in prompts],
            lambda indices: read_label_logits(self, [prompts[i] for i in indices], label_ids),
        )

    def _score_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Return the mean log-probability of the tokens of each answer after its prompt."""
        rows = [[*ids, *answer] for ids, answer in zip(prompts, answers, strict=True)]

        def score(indices: list[int]) -> list[float]:
            return compute_mean_logprobs(self, [rows[i] for i in indices], [len(answers[i]) for i in indices])

        return self.run_batched(rows, score)

    # --- reading ----------------------------------------------------------------------------------

    def _can_join_prefills(self, request: SignalRequest) -> bool:
        """Return whether prompts that were read in separate forward passes may be answered in one batch.

        Such a large batch fits into memory only if the answers share its cache. Drafts that share a cache cannot be
        continued later.
        """
        generates_answers = bool(request.draft_tokens or request.samples)
        return generates_answers and self.shares_prompt_cache and not request.resumable

    def _prefill(self, ids: list[list[int]], request: SignalRequest, limits: BatchLimits) -> DecodingBatch:
        """Run the model over the prompts of a batch, without generating answers (prefill).

        If possible, the prompts are split over several forward passes of the maximum size `limits`.
        """
        layers = sorted({*self._resolve_layers(request.layers), *self._sample_layers(request)})
        if self._can_join_prefills(request):
            parts = split_into_batches([len(tokens) for tokens in ids], limits, rows=1)
            return join_prefills([prefill(self, [ids[i] for i in indices], layers) for indices in parts])
        # If no answers are generated, layers above those whose states are requested need not be run.
        states_only = not (request.draft_tokens or request.samples) and supports_partial_pass(self.loaded.model)
        return prefill(self, ids, layers, states_only=states_only)

    def _answer_batch(
        self, batch: DecodingBatch, prompts: list[Prompt], request: SignalRequest
    ) -> Callable[[], list[Reading]]:
        """Generate the answers to one batch of prompts.

        Returns:
            A function that returns the reading of each prompt. It does not use the GPU, so it can run in another thread
            while the GPU works on the next batch.
        """
        hidden = {layer: batch.hidden[layer] for layer in self._resolve_layers(request.layers)}
        collect_answers = self._answer(batch, prompts, request)
        # Copied last, because the host waits for a copy.
        prompt_states = {layer: _to_numpy(states) for layer, states in hidden.items()}
        # Readings refer to the batch only if drafts may be continued. Otherwise its GPU memory can be freed at once.
        source = batch if request.resumable else None
        return lambda: self._make_readings(collect_answers(), source, prompt_states, request)

    def _make_readings(
        self, answered: DraftsAndSamples, batch: DecodingBatch | None, states: dict[int, Vector], request: SignalRequest
    ) -> list[Reading]:
        """Make the reading of each prompt of a batch.

        Args:
            answered: The answers.
            batch: The batch, if its drafts may be continued later; else None.
            states: Layer -> hidden states at the ends of the prompts (prompts x width).
            request: The requested signals.
        """
        samples = self._decode_samples(answered.samples)
        n = request.samples
        # The batch has rows only for unfinished drafts.
        rows = {draft_index: row for row, draft_index in enumerate(answered.unfinished)}
        layers_after = request.layers if request.after_draft else ()
        readings = []
        for i, draft in enumerate(answered.drafts):
            of_prompt = slice(i * n, (i + 1) * n)  # the samples of this prompt
            reading = Reading(
                draft=self._make_completion(draft, with_tokens=True) if request.draft_tokens else None,
                # Negative layer numbers count from the end. The modulo makes them positive.
                hidden={layer: states[layer % self.depth][i].copy() for layer in request.layers},
                hidden_after={layer: _to_numpy(draft.states[layer % self.depth]) for layer in layers_after},
                samples=tuple(samples[of_prompt]),
                resume=HFResumeHandle(batch, rows.get(i), draft) if batch is not None else None,
                sample_states=self._stack_sample_states(answered.samples[of_prompt], request),
            )
            readings.append(reading)
        return readings

    def _decode_samples(self, samples: list[GeneratedAnswer]) -> list[Completion]:
        """Convert samples to completions. Many samples are equal, so each distinct one is decoded once."""
        keys = [(tuple(sample.tokens), sample.finished) for sample in samples]
        distinct = dict(zip(keys, samples, strict=True))
        texts = tokenization.decode_all(self.tokenizer, [sample.tokens for sample in distinct.values()])
        completions = {}
        for (key, sample), text in zip(distinct.items(), texts, strict=True):
            completions[key] = self._make_completion(sample, text=text)
        return [completions[key] for key in keys]

    def _stack_sample_states(self, samples: list[GeneratedAnswer], request: SignalRequest) -> Vector | None:
        """Return the hidden states at the ends of one prompt's samples (samples x width), or None."""
        layers = self._sample_layers(request)
        return _to_numpy(torch.stack([sample.states[layers[0]] for sample in samples])) if layers else None

    def _answer(self, batch: DecodingBatch, prompts: list[Prompt], request: SignalRequest) -> AnswerCollector:
        """Generate the greedy answers (drafts) and the sampled answers to a batch, if possible in the same steps.

        Returns:
            A function that returns the answers.
        """
        if not request.samples:
            return self._draft(batch, request)
        check_sampling(request.sampling)
        uniforms = np.concatenate([draw_uniforms(prompt, request) for prompt in prompts])
        has_equal_lengths = request.sample_tokens == request.draft_tokens
        if self._can_share_drafts(batch, request) and has_equal_lengths and not self._sample_layers(request):
            generation = SharedGeneration(batch, uniforms, request.sampling, self.stop_ids, with_drafts=True)
            return generation.run(self._draft_layers(request)).split  # for the caller to call
        samples = self._draw_samples(batch, uniforms, request)
        collect_drafts = self._draft(batch, request)
        return lambda: replace(collect_drafts(), samples=samples)

    def _draft(self, batch: DecodingBatch, request: SignalRequest) -> AnswerCollector:
        """Generate the greedy answer (draft) to each prompt of a batch, without samples.

        Returns:
            A function that returns the drafts.
        """
        layers = self._draft_layers(request)
        if self._can_share_drafts(batch, request):
            no_uniforms = np.empty((0, request.draft_tokens))  # greedy answers need no random numbers
            generation = SharedGeneration(batch, no_uniforms, None, self.stop_ids, with_drafts=True)
            return generation.run(layers).split  # for the caller to call
        drafts = [GeneratedAnswer() for _ in range(len(batch))]
        unfinished = decode_greedily(batch, drafts, request.draft_tokens, self.stop_ids, layers)
        return lambda: DraftsAndSamples(drafts, [], unfinished)

    def _can_share_drafts(self, batch: DecodingBatch, request: SignalRequest) -> bool:
        """Return whether to generate the drafts with `SharedGeneration`, which is faster for several answers.

        Such drafts cannot be continued later.
        """
        is_single_draft = len(batch) == 1 and request.samples == 0
        can_share = self.shares_prompt_cache and not request.resumable
        return can_share and request.draft_tokens > 0 and not is_single_draft

    def _draw_samples(
        self, batch: DecodingBatch, uniforms: NDArray[np.float64], request: SignalRequest
    ) -> list[GeneratedAnswer]:
        """Draw the sampled answers to each prompt of a batch.

        `uniforms` are random numbers from 0 to 1, one for each token of each sample. They have one row per sample: first
        those of the samples of the first prompt.
        """
        layers = self._sample_layers(request)
        sampling, stop_ids, read_end_token = request.sampling, self.stop_ids, request.sample_end
        if self.shares_prompt_cache:
            generation = SharedGeneration(batch, uniforms, sampling, stop_ids, read_end_token=read_end_token)
            return generation.run(layers).split().samples
        copies = batch.copy(range(len(batch)), repeat=request.samples)  # each sample has its own copy of the cache
        return sample_rows(copies, uniforms, sampling, stop_ids, layers, read_end_token=read_end_token)

    # --- continuing a draft -----------------------------------------------------------------------

    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts greedily until they end or have `max_tokens` tokens, including those of the draft."""
        originals = [check_resume_handle(handle, HFResumeHandle) for handle in handles]
        drafts = [replace(draft, answer=draft.answer.cut(max_tokens)) for draft in originals]  # copies, extended below
        groups: dict[int, list[HFResumeHandle]] = {}  # `id` of a batch -> its drafts that can grow
        for draft in drafts:
            if draft.can_grow(max_tokens):
                groups.setdefault(id(draft.batch), []).append(draft)
        for group in groups.values():
            self.run_alone(functools.partial(self._extend_group, group, max_tokens))
        return [self._make_completion(draft.answer, with_tokens=True) for draft in drafts]

    def _extend_group(self, drafts: list[HFResumeHandle], max_tokens: int) -> None:
        """Extend unfinished drafts of one batch, in place, until they end or have `max_tokens` tokens."""
        # The row is None only for finished drafts. The condition tells the type checker so.
        rows = [draft.row for draft in drafts if draft.row is not None]
        batch = drafts[0].batch.copy(rows)
        decode_greedily(batch, [draft.answer for draft in drafts], max_tokens, self.stop_ids)

    def _start_stream(self, prompt: Prompt, max_tokens: int, resume: object) -> tuple[GeneratedAnswer, Iterator[None]]:
        """Return an answer, and an iterator for adding one token per step.

        With `resume`, the answer begins with a draft.
        """
        if resume is not None:
            original = check_resume_handle(resume, HFResumeHandle)
            handle = self.run_alone(lambda: original.copy(max_tokens))
        else:
            ids = self._encode([prompt], max_tokens)
            batch = self.run_alone(lambda: prefill(self, ids))
            handle = HFResumeHandle(batch, 0, GeneratedAnswer())
        return handle.answer, self._iter_steps(handle, max_tokens)

    def _iter_steps(self, draft: HFResumeHandle, max_tokens: int) -> Iterator[None]:
        """Extend a draft in place, yielding after each token. Other calls may use the model in between."""
        if not draft.can_grow(max_tokens):
            return
        steps = iter_greedy_steps(draft.batch, [draft.answer], max_tokens, self.stop_ids)
        no_more_steps = object()
        while self.run_alone(lambda: next(steps, no_more_steps)) is not no_more_steps:
            yield


def _to_numpy(state: torch.Tensor) -> Vector:
    """Copy hidden states from the device to a float32 array, and check the values."""
    values: Vector = state.float().cpu().numpy().copy()
    if not np.isfinite(values).all():
        raise make_nan_error("NaN hidden states")
    return values
