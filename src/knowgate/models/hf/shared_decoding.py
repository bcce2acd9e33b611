"""Generate drafts and samples quickly, where all answers to a prompt share its keys and values.

The results equal those of `decoding`, but the answers cannot be continued later. Chosen tokens stay on the device until
all answers are complete. Only every few tokens, the host checks which answers have ended and removes them from the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from knowgate.core.stop_flag import check_stop_flag
from knowgate.models.hf.batching import make_nan_error
from knowgate.models.hf.cuda_graph import GraphedStep
from knowgate.models.hf.decoding import DecodingBatch, compute_step_statistics, draw_tokens_on_device
from knowgate.models.hf.forward_pass import SharedCache, use_shared_attention
from knowgate.models.local_backend import GeneratedAnswer, TokenStep
from knowgate.types import Sampling

StepOutput = tuple[torch.Tensor, dict[int, torch.Tensor]]  # logits of the next token, and hidden states by layer
NO_TOKEN = -1  # stands in place of a token after the end of an answer
# Number of tokens between two checks for ended answers. On a GPU, each check makes the host wait for the device.
CHECK_INTERVALS = {"cpu": 1}
DEFAULT_CHECK_INTERVAL = 4
COMPACTION_THRESHOLD = 0.9  # compact the batch if at most this share of its rows would remain
# Compact the batch if this many steps of single answers are saved. On a GPU, the step must be captured again afterwards.
MIN_SAVED_STEPS = {"cpu": 0}
DEFAULT_MIN_SAVED_STEPS = 8_192


class SharedDecodingBatch:
    """A batch of answers, generated in parallel from shared prompt keys and values.

    Each step reads one token of every answer.

    Args:
        model: The transformers model.
        prompt_cache: Keys and values of the prompts; not changed.
        mask: Attention mask of the prompts.
        answers: Number of answers per prompt, all empty at first.
        max_tokens: Maximum number of tokens per answer.
    """

    def __init__(self, model: Any, prompt_cache: Cache, mask: torch.Tensor, answers: int, max_tokens: int):
        self.model = model
        self.cache = SharedCache(prompt_cache, mask, answers, max_tokens)
        # The answers that are still in the batch (prompts x answers), as indices among all answers at the start.
        self.answer_indices = torch.arange(len(mask) * answers, device=mask.device).view(len(mask), answers)
        # Position of the next token of each answer, counted from the start of its prompt (one column, as the model
        # takes it).
        self.positions = mask.sum(dim=1).repeat_interleave(answers)[:, None]
        self.n_steps_left = max_tokens  # number of tokens that each answer still has room for
        self._start_capture()

    def _start_capture(self) -> None:
        """Start a new CUDA graph, because the tensors of a step were replaced."""
        self._tokens = torch.zeros_like(self.positions)
        self._step: GraphedStep[StepOutput] = GraphedStep(self._tokens.device)

    def feed(self, tokens: torch.Tensor, layers: Sequence[int]) -> StepOutput:
        """Let the model read one token per answer.

        Args:
            tokens: The tokens (prompts x answers).
            layers: Layers whose hidden states are returned; the same in every call.

        Returns:
            Logits (prompts x answers x vocabulary) and hidden states by layer. The next call overwrites them.
        """
        self._tokens.copy_(tokens.reshape(-1, 1))
        output = self._step.run(lambda: self._read_tokens(layers), n_calls_left=self.n_steps_left)
        self.n_steps_left -= 1
        return output

    def _read_tokens(self, layers: Sequence[int]) -> StepOutput:
        """Run the model on `_tokens`, one token per answer.

        State is changed in place, so that a CUDA graph can repeat this.
        """
        self.cache.start_token()
        with use_shared_attention(self.model, self.cache):
            output = self.model(
                input_ids=self._tokens,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
                output_hidden_states=bool(layers),
            )
        self.positions += 1
        shape = self.answer_indices.shape  # prompts x answers; the model sees them as one long batch
        hidden = {layer: output.hidden_states[layer][:, -1].view(*shape, -1) for layer in layers}
        return output.logits[:, -1].view(*shape, -1), hidden

    def select(self, prompts: torch.Tensor, answers: torch.Tensor, *, has_all_prompts: bool) -> None:
        """Keep only some prompts and answers in the batch.

        Args:
            prompts: Indices of the prompts to keep (kept prompts x 1).
            answers: For each prompt to keep, the indices of its answers to keep (kept prompts x kept answers).
            has_all_prompts: Whether all prompts are kept, in order.
        """
        self.cache.select(prompts, answers, has_all_prompts=has_all_prompts)
        positions = self.positions.view_as(self.answer_indices)  # prompts x answers, like the indices
        self.positions = positions[prompts, answers].reshape(-1, 1)
        self.answer_indices = self.answer_indices[prompts, answers]
        self._start_capture()


@dataclass(frozen=True)
class DraftsAndSamples:
    """The answers generated for a batch of prompts.

    Args:
        drafts: The greedy answer (draft) to each prompt.
        samples: The randomly drawn answers (samples) to all prompts. Those to the first prompt come first.
        unfinished: Indices of the drafts that stopped at the maximum length and can be continued later. The decoding
            batch still has one row for each of these drafts, in this order.
    """

    drafts: list[GeneratedAnswer]
    samples: list[GeneratedAnswer]
    unfinished: Sequence[int] = ()


@dataclass(frozen=True)
class AnswerArrays:
    """Generated answers on the host, before they become one object each.

    Args:
        tokens: Token ids (answers x tokens), with NO_TOKEN after the end of an answer.
        has_ended: Whether the model ended each answer.
        states: Layer -> hidden states at the end of each answer (answers x width).
        statistics: Logprob, entropy and margin of the drafts' tokens (3 x prompts x tokens). None without drafts.
        per_prompt: Number of answers per prompt. If there are drafts, the first answer is the draft.
    """

    tokens: NDArray[np.int64]
    has_ended: list[bool]
    states: Mapping[int, torch.Tensor]
    statistics: list[list[list[float]]] | None
    per_prompt: int

    def split(self) -> DraftsAndSamples:
        """Make an object for each answer, and separate drafts from samples.

        This takes long, so it runs while the GPU generates the next answers.
        """
        answers = self._make_answers()
        if self.statistics is None:
            return DraftsAndSamples([], answers)
        # All answers to a prompt are adjacent: first the draft, then the samples.
        drafts = answers[:: self.per_prompt]
        samples = [answer for number, answer in enumerate(answers) if number % self.per_prompt]
        for draft, *statistics in zip(drafts, *self.statistics, strict=True):
            # The lists of statistics go on after the end of an answer. `zip` cuts them to its tokens.
            steps = zip(draft.tokens, *statistics, strict=False)
            draft.steps = [TokenStep(*step) for step in steps]
        return DraftsAndSamples(drafts, samples)

    def _make_answers(self) -> list[GeneratedAnswer]:
        """Make an object for each answer, without statistics of its tokens."""
        lengths = (self.tokens != NO_TOKEN).sum(axis=1).tolist()
        answers = []
        for i, (padded, length) in enumerate(zip(self.tokens.tolist(), lengths, strict=True)):
            states = {layer: block[i] for layer, block in self.states.items()}
            answers.append(GeneratedAnswer(padded[:length], finished=self.has_ended[i], states=states))
        return answers


class SharedGeneration:
    """Generates several answers to each prompt in parallel, token by token.

    Tokens of samples are drawn at random. Drafts get the most probable tokens.

    Args:
        prompts: The prompts after the forward pass over them (prefill).
        uniforms: Random numbers from 0 to 1, one for each token of each sample (samples x tokens). All prompts have
            equally many samples; those of the first prompt come first. The number of columns is the maximum length of
            drafts and samples.
        sampling: Temperature, top_p and top_k of the samples; None if there are only drafts.
        stop_ids: Tokens that end an answer.
        with_drafts: Also generate a draft for each prompt, with statistics of its tokens.
        read_end_token: Let the model also read the token that ends an answer, and keep the hidden states there.
    """

    def __init__(
        self,
        prompts: DecodingBatch,
        uniforms: NDArray[np.float64],
        sampling: Sampling | None,
        stop_ids: frozenset[int],
        *,
        with_drafts: bool = False,
        read_end_token: bool = False,
    ):
        device = prompts.mask.device
        n_prompts = len(prompts)
        max_tokens = uniforms.shape[1]
        # The shape becomes prompts x answers x tokens.
        numbers = torch.tensor(uniforms, dtype=torch.float32, device=device).view(n_prompts, -1, max_tokens)
        if with_drafts:  # the draft is the first answer to a prompt; it is not drawn, so its numbers are never used
            numbers = torch.cat([numbers.new_zeros(n_prompts, 1, max_tokens), numbers], dim=1)
        self.prompts = prompts
        self.sampling = sampling
        self.read_end_token = read_end_token
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        self.per_prompt = numbers.shape[1]  # number of answers per prompt; the first is the draft, if there are drafts
        self.uniforms = numbers.flatten(0, 1)  # answers x tokens
        self.batch = SharedDecodingBatch(prompts.model, prompts.cache, prompts.mask, self.per_prompt, max_tokens)
        # Logprob, entropy and margin of the drafts' tokens (3 x prompts x tokens).
        self.statistics = torch.zeros(3, n_prompts, max_tokens, device=device) if with_drafts else None
        # Indices of the drafts among the answers that are still in the batch.
        self.draft_slots = torch.arange(n_prompts if with_drafts else 0, device=device) * self.per_prompt
        n_answers = n_prompts * self.per_prompt
        self.tokens = torch.full((n_answers, max_tokens), NO_TOKEN, device=device)
        self.has_ended = torch.zeros(n_answers, dtype=torch.bool, device=device)
        # Whether the model still reads the chosen tokens of each answer in the batch (prompts x answers).
        self.is_active = torch.ones(n_prompts, self.per_prompt, dtype=torch.bool, device=device)
        self.states: dict[int, torch.Tensor] = {}  # layer -> hidden states at the token read last (answers x width)
        self.are_finite: list[torch.Tensor] = []  # flags on the device, one per step; `check_finite` reads them

    def run(self, layers: Sequence[int]) -> AnswerArrays:
        """Generate all answers and return them.

        Every few steps, ended answers are removed from the batch.

        Args:
            layers: Layers whose hidden states at the last token of each answer are kept.
        """
        max_tokens = self.tokens.shape[1]
        interval = CHECK_INTERVALS.get(self.tokens.device.type, DEFAULT_CHECK_INTERVAL)
        logits = self._start(layers)
        for position in range(max_tokens):
            chosen = self.choose(logits, position)
            self.append(chosen, position)
            is_last = position == max_tokens - 1
            if is_last and not layers:  # the model need not read the last tokens, because none are chosen after them
                break
            if (position + 1) % interval == 0 or is_last:
                self.check_finite()
                is_active = self.is_active.cpu().numpy()
                if not is_active.any():  # all answers have ended
                    break
                chosen = self.compact(chosen, is_active)
            check_stop_flag()
            logits, hidden = self.batch.feed(chosen, layers)
            self.store_states(hidden)
        return self.copy_to_host()

    def _start(self, layers: Sequence[int]) -> torch.Tensor:
        """Return the logits after each prompt (prompts x 1 x vocabulary), and store the hidden states there.

        All answers to a prompt have the same first logits and hidden states.
        """
        logits = self.prompts.compute_logits(layers)[:, None]
        states = {layer: self.prompts.hidden[layer][:, None] for layer in layers}
        self.store_states({layer: state.expand(-1, self.per_prompt, -1) for layer, state in states.items()})
        return logits

    def choose(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Choose the next token of each answer: the most probable one for drafts, a random one for samples.

        Args:
            logits: Logits (prompts x answers x vocabulary). For the first token, all answers to a prompt share one row
                (prompts x 1 x vocabulary).
            position: Number of the token in the answer.
        """
        indices = self.batch.answer_indices
        flat_logits = logits.flatten(0, 1)
        if self.sampling is None:  # all answers are drafts, and `_choose_for_drafts` sets their tokens
            tokens = torch.empty_like(indices)
        else:  # drafts get random tokens, too, which `_choose_for_drafts` replaces
            uniforms = self.uniforms[indices, position].view(len(flat_logits), -1)
            tokens, are_finite = draw_tokens_on_device(flat_logits, uniforms, self.sampling)
            tokens = tokens.view_as(indices)
            self.are_finite.append(are_finite)
        if self.statistics is not None and len(self.draft_slots):
            self._choose_for_drafts(tokens.view(-1), flat_logits, self.statistics[:, :, position])
        return tokens

    def _choose_for_drafts(self, tokens: torch.Tensor, logits: torch.Tensor, statistics: torch.Tensor) -> None:
        """Set the next token of each draft to the most probable one, and store its statistics.

        Args:
            tokens: The next token of each answer in the batch, changed in place.
            logits: One row per answer; for the first token, one row per prompt, which all of its answers share.
            statistics: Logprob, entropy and margin of the next token (3 x prompts), changed in place.
        """
        slots = self.draft_slots
        has_row_per_draft = len(logits) == len(slots)  # for the first token, or if there are only drafts
        draft_logits = logits if has_row_per_draft else logits[slots]
        tokens[slots], logprobs, entropies, margins = compute_step_statistics(draft_logits)
        self.are_finite.append(torch.isfinite(logprobs).all())
        # Answers are numbered prompt by prompt, so the index of a draft tells its prompt.
        prompts = self.batch.answer_indices.view(-1)[slots] // self.per_prompt
        statistics[:, prompts] = torch.stack([logprobs, entropies, margins])

    def append(self, chosen: torch.Tensor, position: int) -> None:
        """Append the chosen token to each answer, or NO_TOKEN if the answer has ended, and mark ended answers.

        Args:
            chosen: The chosen tokens (prompts x answers).
            position: Index of the token in the answer.
        """
        indices = self.batch.answer_indices
        had_ended = self.has_ended[indices]
        has_ended = had_ended | torch.isin(chosen, self.stop_ids)
        self.tokens[indices, position] = chosen.masked_fill(has_ended, NO_TOKEN)
        self.has_ended[indices] = has_ended
        # With `read_end_token`, an answer stays active until the model has read the token that ended the answer.
        self.is_active = ~had_ended if self.read_end_token else ~has_ended

    def store_states(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Store the hidden states at the tokens just read, replacing earlier states.

        Ended answers keep their states.

        Args:
            hidden: Layer -> states of the answers in the batch (prompts x answers x width).
        """
        indices = self.batch.answer_indices
        is_active = self.is_active[..., None]  # prompts x answers x 1
        for layer, new_states in hidden.items():
            stored = self.states.setdefault(layer, new_states.new_zeros(self.tokens.shape[0], new_states.shape[-1]))
            stored[indices] = new_states.where(is_active, stored[indices])

    def compact(self, chosen: torch.Tensor, is_active: NDArray[np.bool_]) -> torch.Tensor:
        """Remove ended answers from the batch to save work.

        The batch stays unchanged if little would be saved.

        Args:
            chosen: The tokens that the model reads next (prompts x answers).
            is_active: Whether the model still reads tokens of each answer (prompts x answers).

        Returns:
            `chosen` without the removed answers.
        """
        kept_prompts, kept_answers = self._choose_shape(is_active)
        is_much_smaller = kept_answers.size <= COMPACTION_THRESHOLD * is_active.size
        n_saved_steps = (is_active.size - kept_answers.size) * self.batch.n_steps_left
        if not is_much_smaller or n_saved_steps < MIN_SAVED_STEPS.get(chosen.device.type, DEFAULT_MIN_SAVED_STEPS):
            return chosen
        prompts = torch.from_numpy(kept_prompts[:, None]).to(chosen.device)
        answers = torch.from_numpy(kept_answers).to(chosen.device)
        has_all_prompts = np.array_equal(kept_prompts, np.arange(len(is_active)))
        self.batch.select(prompts, answers, has_all_prompts=has_all_prompts)
        self.is_active = self.is_active[prompts, answers]
        if len(self.draft_slots):  # the drafts have the indices 0, per_prompt, 2 * per_prompt, ...
            self.draft_slots = (self.batch.answer_indices.flatten() % self.per_prompt == 0).nonzero()[:, 0]
        return chosen[prompts, answers]

    def _choose_shape(self, is_active: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choose the shape of the batch (prompts x answers) after ended answers are removed.

        There are two possible shapes. One has a row for each active answer, and copies the prompt's cache to each row. The
        other has a row for each prompt, and as many columns as the prompt with the most active answers needs. In the
        second shape, some ended answers stay.

        Returns:
            The index of the prompt of each row, and the indices of the row's answers (rows x columns).
        """
        prompts, answers = np.nonzero(is_active)  # of each active answer
        active_prompts = np.flatnonzero(is_active.any(axis=1))
        n_columns = int(is_active.sum(axis=1).max())
        cache = self.batch.cache
        old_cache_size = len(is_active) * cache.prompt_width + is_active.size * cache.max_tokens
        copied_cache_size = len(prompts) * (cache.prompt_width + cache.max_tokens)
        has_fewer_answers = len(prompts) < COMPACTION_THRESHOLD * len(active_prompts) * n_columns
        if has_fewer_answers and copied_cache_size <= old_cache_size:
            return prompts, answers[:, None]
        # Sorting by "has ended" (False before True) moves the active answers to the front of each row.
        return active_prompts, np.argsort(~is_active[active_prompts], axis=1, kind="stable")[:, :n_columns]

    def check_finite(self) -> None:
        """Raise ModelError if any logits so far were not finite."""
        if self.are_finite and not bool(torch.stack(self.are_finite).all()):
            raise make_nan_error()
        self.are_finite = []

    def copy_to_host(self) -> AnswerArrays:
        """Copy all answers from the device to the host."""
        self.check_finite()
        return AnswerArrays(
            tokens=self.tokens.cpu().numpy(),
            has_ended=self.has_ended.tolist(),
            states={layer: block.float().cpu() for layer, block in self.states.items()},
            statistics=None if self.statistics is None else self.statistics.tolist(),
            per_prompt=self.per_prompt,
        )


def join_prefills(parts: Sequence[DecodingBatch]) -> DecodingBatch:
    """Join several groups of prompts into one batch for generating the answers.

    Reading prompts (prefill) needs much memory, so it is done in small groups. Generating answers needs less.

    Args:
        parts: The groups after their prefill, with logits. To save memory, this function empties their caches.
    """
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)
    masks = [torch.nn.functional.pad(part.mask, (width - part.mask.shape[1], 0)) for part in parts]
    layers = [_join_layer(parts, number, width) for number in range(len(parts[0].cache.layers))]
    return DecodingBatch(
        parts[0].model,
        cache=DynamicCache(layers),
        mask=torch.cat(masks),
        logits=torch.cat([part.compute_logits() for part in parts]),
        hidden={layer: torch.cat([part.hidden[layer] for part in parts]) for layer in parts[0].hidden},
    )


def _join_layer(parts: Sequence[DecodingBatch], number: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the keys and the values of one layer, and remove them from the parts.

    So their memory is free before the next layer is joined.
    """
    caches = [part.cache.layers[number] for part in parts]
    for part in parts:
        part.cache.layers[number] = DynamicLayer()
    keys = _join_tokens([cache.keys for cache in caches], width)
    return keys, _join_tokens([cache.values for cache in caches], width)


def _join_tokens(blocks: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Stack keys or values (prompts x heads x tokens x size) of several batches, padded on the left to `width` tokens."""
    return torch.cat([torch.nn.functional.pad(block, (0, 0, width - block.shape[2], 0)) for block in blocks])
