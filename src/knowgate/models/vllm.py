"""A model that vLLM runs in this process, for large batches of questions on a GPU. Experimental.

It reads drafts with log-probabilities, samples, and probabilities of labels. It returns no hidden states: gates that read
them need an hf: model or a vLLM server that returns them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from knowgate.errors import UnsupportedSignal, require_extra
from knowgate.models.backend import check_resume_handle, check_sampling
from knowgate.models.local_backend import GeneratedAnswer, LocalBackend, TokenStep, get_max_tokens
from knowgate.models.openai.responses import TokenLogprobs
from knowgate.models.tokenization import LabelPromptTokens, split_positions
from knowgate.types import Completion, Prompt, Reading, Signal, SignalRequest, Vector

MARGIN_TOP_TOKENS = 2  # the margin compares the two most probable tokens
ENTROPY_TOP_TOKENS = 2_000  # enough to estimate the entropy over the vocabulary


@dataclass(frozen=True)
class VllmResumeHandle:
    """A draft that can be continued, and the token ids of its prompt."""

    ids: list[int]
    draft: GeneratedAnswer


@dataclass(frozen=True)
class VllmModel(LocalBackend):
    """A transformers model run by vLLM's offline engine, which is started on first use.

    Args:
        source: Hub name or folder.
        lock: Held while the engine is used.

    Example:
        >>> VllmModel("Qwen/Qwen2.5-7B-Instruct").name  # nothing is loaded yet
        'vllm:Qwen/Qwen2.5-7B-Instruct'
    """

    source: str
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    offers = frozenset({Signal.DRAFT, Signal.LOGPROBS, Signal.SAMPLES, Signal.LABELS})
    depth = 0  # it returns no hidden states
    first_batch_size = 512  # vLLM schedules hundreds of requests at once

    @property
    def name(self) -> str:
        """The spec of the model."""
        return f"vllm:{self.source}"

    @functools.cached_property
    def engine(self) -> Any:
        """The running engine, a `vllm.LLM`.

        Raises:
            MissingExtra: vLLM is not installed.
        """
        with require_extra("running a model with vLLM", "vllm"):
            from vllm import LLM
        return LLM(model=self.source, max_logprobs=ENTROPY_TOP_TOKENS, enable_prefix_caching=True)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the weights. It differs from the hash of hf: models."""
        from knowgate.models.hf.loader import compute_fingerprint

        return f"vllm-{compute_fingerprint(self.source, lambda: self.engine.llm_engine.model_config.hf_config)}"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.engine.get_tokenizer()

    @property
    def context_window(self) -> int:
        """Number of tokens that the model can read at once."""
        return int(self.engine.llm_engine.model_config.max_model_len)

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of all prompts, computed in one batch.

        Raises:
            UnsupportedSignal: Hidden states are requested.
        """
        if request.layers or request.sample_layer is not None:
            raise UnsupportedSignal(f"{self.name} returns no hidden states. Use hf:NAME, or a gate that needs none.")
        with self.lock:
            ids = self._encode(prompts, get_max_tokens(request))
            top = ENTROPY_TOP_TOKENS if request.entropies else MARGIN_TOP_TOKENS
            limits = [request.draft_tokens] * len(ids)
            drafts = self._decode_greedily(ids, limits, top) if request.draft_tokens else []
            samples = self._draw_samples(ids, request) if request.samples else [[] for _ in ids]
        readings = []
        for i, drawn in enumerate(samples):
            draft = self._make_completion(drafts[i], with_tokens=True) if drafts else None
            handle = VllmResumeHandle(ids[i], drafts[i]) if drafts and request.resumable else None
            completions = tuple(self._make_completion(sample) for sample in drawn)
            readings.append(Reading(draft, samples=completions, resume=handle))
        return readings

    def _read_labels(self, prompts: Sequence[LabelPromptTokens], label_ids: Sequence[int]) -> list[Vector]:
        """Return the log-probabilities of the labels at each position (positions x labels).

        vLLM gets one request per position.
        """
        beginnings = [prompt.ids[: position + 1] for prompt in prompts for position in prompt.positions]
        with self.lock:
            outputs = self._generate(beginnings, [1] * len(beginnings), temperature=0.0, logprob_token_ids=label_ids)
        # Each request has one answer of one token, for which vLLM lists the labels.
        listed = [output.outputs[0].logprobs[0] for output in outputs]
        values = [[tokens[label].logprob for label in label_ids] for tokens in listed]
        return split_positions(np.array(values, dtype=np.float32), prompts)

    def _score_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """Return the mean log-probability of the tokens of each answer after its prompt."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        with self.lock:
            outputs = self._generate(rows, [1] * len(rows), temperature=0.0, prompt_logprobs=1)
        scores = []
        for output, prompt, answer in zip(outputs, prompts, answers, strict=True):
            positions = output.prompt_logprobs[len(prompt) :]
            values = [position[token].logprob for position, token in zip(positions, answer, strict=True)]
            scores.append(float(np.mean(values)))
        return scores

    # --- generating -------------------------------------------------------------------------------

    def _generate(self, ids: Sequence[list[int]], limits: Sequence[int], **parameters: Any) -> list[Any]:
        """Run vLLM on prompts given as token ids.

        Args:
            ids: Token ids of each prompt.
            limits: Maximum number of tokens of each answer.
            parameters: Sampling parameters of all prompts.
        """
        if not ids:
            return []
        engine = self.engine
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": row} for row in ids]
        sampling = [SamplingParams(detokenize=False, max_tokens=limit, **parameters) for limit in limits]
        return list(engine.generate(prompts, sampling, use_tqdm=False))

    def _decode_greedily(
        self, ids: Sequence[list[int]], limits: Sequence[int], top: int = MARGIN_TOP_TOKENS
    ) -> list[GeneratedAnswer]:
        """Generate greedy answers, with statistics of their tokens such as the entropy.

        Args:
            ids: Token ids of each prompt.
            limits: Maximum number of tokens of each answer.
            top: Number of most probable tokens per position that the statistics are computed from.
        """
        outputs = self._generate(ids, limits, temperature=0.0, logprobs=top)
        return [_parse_answer(output.outputs[0]) for output in outputs]

    def _draw_samples(self, ids: Sequence[list[int]], request: SignalRequest) -> list[list[GeneratedAnswer]]:
        """Draw the samples of each prompt. vLLM computes the prompt only once for all of them."""
        sampling = request.sampling
        check_sampling(sampling)
        outputs = self._generate(
            ids,
            [request.sample_tokens] * len(ids),
            n=request.samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,  # -1 keeps every token
            seed=request.seed,
        )
        return [[_parse_answer(sample) for sample in output.outputs] for output in outputs]

    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts (beginnings of answers) greedily, all in one batch, and return the whole answers."""
        drafts = [check_resume_handle(handle, VllmResumeHandle) for handle in handles]
        return [self._make_completion(answer, with_tokens=True) for answer in self._complete(drafts, max_tokens)]

    def _complete(self, drafts: Sequence[VllmResumeHandle], max_tokens: int) -> list[GeneratedAnswer]:
        """Continue drafts in one batch, until they end or have `max_tokens` tokens."""
        copies = [replace(handle, draft=handle.draft.cut(max_tokens)) for handle in drafts]
        unfinished = [copy for copy in copies if not copy.draft.finished and len(copy.draft.tokens) < max_tokens]
        inputs = [[*copy.ids, *copy.draft.tokens] for copy in unfinished]  # token ids of prompt and draft
        limits = [max_tokens - len(copy.draft.tokens) for copy in unfinished]
        with self.lock:
            continuations = self._decode_greedily(inputs, limits)
        for copy, continuation in zip(unfinished, continuations, strict=True):
            copy.draft.tokens += continuation.tokens
            copy.draft.steps += continuation.steps
            copy.draft.finished = continuation.finished
        return [copy.draft for copy in copies]

    def _start_stream(self, prompt: Prompt, max_tokens: int, resume: object) -> tuple[GeneratedAnswer, Iterator[None]]:
        """Return the complete answer and an empty iterator.

        vLLM's offline engine cannot stream.
        """
        if resume is None:
            empty_draft = GeneratedAnswer()
            draft = VllmResumeHandle(self._encode([prompt], max_tokens)[0], empty_draft)
        else:
            draft = check_resume_handle(resume, VllmResumeHandle)
        return self._complete([draft], max_tokens)[0], iter(())


def _parse_answer(output: Any) -> GeneratedAnswer:
    """Convert a completion of vLLM to an answer, without the end token."""
    is_finished = output.finish_reason == "stop"
    tokens = list(output.token_ids)
    if is_finished:
        tokens.pop()
    # `logprobs` is None if none were requested. Otherwise it may have an entry for the end token, which is ignored.
    steps = [_make_step(token, listed) for token, listed in zip(tokens, output.logprobs or (), strict=False)]
    return GeneratedAnswer(tokens, steps, is_finished)


def _make_step(token: int, listed: Mapping[int, Any]) -> TokenStep:
    """Compute the statistics of a chosen token from the tokens that vLLM lists at its position."""
    values = sorted((entry.logprob for entry in listed.values()), reverse=True)
    # Entropy and margin depend only on the log-probabilities, so the texts of the tokens are left empty.
    statistics = TokenLogprobs("", listed[token].logprob, tuple(("", value) for value in values))
    return TokenStep(token, statistics.logprob, statistics.entropy, statistics.margin)
