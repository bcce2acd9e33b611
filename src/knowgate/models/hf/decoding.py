"""Generate tokens with a transformers model: greedy drafts, samples, and continuations of drafts.

Prefill is the forward pass over a whole prompt. A `DecodingBatch` keeps its keys and values, so drafts, samples and later
continuations use the same prefill. This module works on token ids and tensors only, not on text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from knowgate.core.stop_flag import check_stop_flag
from knowgate.models.hf.batching import make_nan_error
from knowgate.models.hf.forward_pass import (
    PartialPass,
    capture_last_states,
    run_lower_layers,
    supports_partial_pass,
)
from knowgate.models.hf.local_model import LocalModel
from knowgate.models.local_backend import GeneratedAnswer, TokenStep
from knowgate.types import Sampling

Answers = list[GeneratedAnswer]
INITIAL_TOP_P_WIDTH = 256  # most probable tokens to try first; sorting a whole vocabulary is slow


@dataclass
class DecodingBatch:
    """A batch of prompts for which answers are being generated, one per row.

    Args:
        model: The transformers model.
        cache: Keys and values of all tokens that the model has read so far.
        mask: Attention mask (rows x tokens).
        logits: Logits of the next token of each row; None if the model must read more first.
        hidden: Hidden states at the last token of each row, by layer.
        unread: The newest token of each row if the model has not read it yet, else None. The model reads it only when
            the next token is needed, which saves a forward pass at the end of an answer.
        lower_pass: The forward pass over the prompts if it has run only the lower layers so far, else None.
    """

    model: Any
    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    unread: torch.Tensor | None = None
    lower_pass: PartialPass | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def compute_logits(self, layers: Sequence[int] = ()) -> torch.Tensor:
        """Return the logits of the next token of every row.

        If necessary, the model first reads the `unread` tokens, or runs the upper layers after `lower_pass`.

        Args:
            layers: Layers whose hidden states at the unread tokens are stored in `hidden`.
        """
        if self.unread is not None:
            self._feed(self.unread, layers)
            self.unread = None
        if self.lower_pass is not None:
            self.logits = self.lower_pass.finish(self.model)
            self.lower_pass = None
        if self.logits is None:
            raise RuntimeError("the batch has no logits, and no tokens to compute logits")
        return self.logits

    def _feed(self, tokens: torch.Tensor, layers: Sequence[int]) -> None:
        """Feed one token per row to the model, and store the resulting logits and hidden states."""
        check_stop_flag()
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(dim=1, keepdim=True) - 1,  # padding has no position
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(layers),
        )
        self.logits = output.logits[:, -1]
        self.hidden = {layer: output.hidden_states[layer][:, -1] for layer in layers}

    def append(self, tokens: torch.Tensor) -> None:
        """Set the next token of every row. The model reads it when logits are needed again."""
        self.unread = tokens
        self.logits = None

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the given rows of the batch and drop all others, in place."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)  # `_select` selects rows from everything but the cache
        vars(self).update(vars(self._select(index, self.cache)))

    def copy(self, rows: Sequence[int], repeat: int = 1) -> DecodingBatch:
        """Return a new batch with `repeat` copies of each of the given rows."""
        index = torch.tensor(rows, device=self.mask.device).repeat_interleave(repeat)
        cache = DynamicCache([(layer.keys[index], layer.values[index]) for layer in self.cache.layers])
        if self.lower_pass is not None:  # the upper layers, which have not run, get empty caches
            n_upper_layers = len(self.model.base_model.layers) - len(cache.layers)
            cache.layers.extend(DynamicLayer() for _ in range(n_upper_layers))
        return self._select(index, cache)

    def _select(self, index: torch.Tensor, cache: Any) -> DecodingBatch:
        """Return a batch of the rows in `index`. `cache` already holds their keys and values only."""
        return DecodingBatch(
            self.model,
            cache,
            mask=self.mask[index],
            logits=None if self.logits is None else self.logits[index],
            hidden={layer: state[index] for layer, state in self.hidden.items()},
            unread=None if self.unread is None else self.unread[index],
            lower_pass=None if self.lower_pass is None else self.lower_pass.select(index, cache),
        )


def prefill(
    local: LocalModel, ids: Sequence[list[int]], layers: Sequence[int] = (), *, states_only: bool = False
) -> DecodingBatch:
    """Run the model over whole prompts, so that the first answer token can be chosen.

    Args:
        local: The model.
        ids: Token ids of each prompt.
        layers: Layers whose hidden states at the last token are kept.
        states_only: Run only the layers up to the highest of `layers`, if only hidden states are needed for now. If
            an answer is generated later, the other layers are run then.
    """
    model = local.loaded.model
    inputs = local.make_inputs(ids)
    cache, mask = inputs["past_key_values"], inputs["attention_mask"]
    pieces = local.split_inputs(inputs)
    if states_only and layers and max(layers) < len(model.base_model.layers) and len(pieces) == 1:
        lower_pass, hidden = run_lower_layers(model, layers, inputs)
        return DecodingBatch(model, cache, mask, logits=None, hidden=hidden, lower_pass=lower_pass)
    if supports_partial_pass(model):
        with capture_last_states(model, layers) as hidden:
            for piece in pieces:
                output = model(**piece, logits_to_keep=1)
    else:
        output = model(**inputs, logits_to_keep=1, output_hidden_states=bool(layers))
        hidden = {layer: output.hidden_states[layer][:, -1].clone() for layer in layers}
    return DecodingBatch(model, cache, mask, logits=output.logits[:, -1], hidden=hidden)


def decode_greedily(
    batch: DecodingBatch, answers: Answers, max_tokens: int, stop_ids: frozenset[int], layers: Sequence[int] = ()
) -> list[int]:
    """Extend answers greedily until they end or have `max_tokens` tokens.

    Args:
        batch: The decoding batch, with one row per answer. Rows of finished answers are removed from it.
        answers: The answers of the batch, extended in place.
        max_tokens: Maximum number of tokens per answer, including those it already has.
        stop_ids: Tokens that end an answer.
        layers: Layers whose hidden states at the last token of each answer are stored in `states`.

    Returns:
        Indices of the unfinished answers. Each of these answers still has a row in the batch, in this order.
    """
    for _ in iter_greedy_steps(batch, answers, max_tokens, stop_ids, layers):
        pass
    return [index for index, answer in enumerate(answers) if not answer.finished]


def iter_greedy_steps(
    batch: DecodingBatch, answers: Answers, max_tokens: int, stop_ids: frozenset[int], layers: Sequence[int] = ()
) -> Iterator[None]:
    """Extend answers greedily like `decode_greedily`, but yield after each token."""
    active = answers  # the answers that are still in the batch, one per row; all have the same length
    _store_states(batch, active, layers)
    while active and len(active[0].tokens) < max_tokens:
        steps = pick_greedy_steps(batch.compute_logits())
        _append_tokens(batch, active, [step.token for step in steps], stop_ids)
        for answer, step in zip(active, steps, strict=True):
            if not answer.finished:  # otherwise the step is the stop token, which is not part of the answer
                answer.steps.append(step)
        active = _drop_finished(batch, active)
        _read_new_tokens(batch, active, layers)
        yield


def _append_tokens(batch: DecodingBatch, answers: Answers, tokens: list[int], stop_ids: frozenset[int]) -> None:
    """Append the next token of each row to its answer. If the token is a stop token, mark the answer as finished."""
    for answer, token in zip(answers, tokens, strict=True):
        if token in stop_ids:
            answer.finished = True
        else:
            answer.tokens.append(token)
    batch.append(torch.tensor(tokens, device=batch.mask.device))


def _store_states(batch: DecodingBatch, answers: Answers, layers: Sequence[int]) -> None:
    """Store the hidden states at the newest token of each row in its answer, in place of earlier states.

    While an answer is empty, the newest token is the last token of the prompt.

    Args:
        batch: The batch, after a forward pass over the newest token of each row.
        answers: The answer of each row.
        layers: Layers whose hidden states are stored.
    """
    if layers:
        for row, answer in enumerate(answers):
            answer.states = {layer: batch.hidden[layer][row] for layer in layers}


def _read_new_tokens(batch: DecodingBatch, answers: Answers, layers: Sequence[int]) -> None:
    """Let the model read the new token of each answer, and store the hidden states of `layers` there.

    Without `layers`, do nothing, because `compute_logits` reads the token when the next one is chosen.
    """
    if layers and answers:
        batch.compute_logits(layers)  # sets `batch.hidden`
        _store_states(batch, answers, layers)


def _drop_finished(batch: DecodingBatch, answers: Answers) -> Answers:
    """Remove the rows of finished answers from a batch, and return the unfinished answers.

    Args:
        batch: The batch, changed in place. If all answers are finished, it stays as it is: a batch must not be empty.
        answers: The answer of each row.
    """
    unfinished_rows = [row for row, answer in enumerate(answers) if not answer.finished]
    if 0 < len(unfinished_rows) < len(answers):
        batch.keep(unfinished_rows)
    return [answers[row] for row in unfinished_rows]


def pick_greedy_steps(logits: torch.Tensor) -> list[TokenStep]:
    """Return the most probable token of each row of logits, with its log-probability, entropy and margin."""
    tokens, logprobs, entropies, margins = compute_step_statistics(logits)
    if not bool(torch.isfinite(logprobs).all()):
        raise make_nan_error()
    rows = zip(tokens.tolist(), logprobs.tolist(), entropies.tolist(), margins.tolist(), strict=True)
    return [TokenStep(*row) for row in rows]


def compute_step_statistics(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the most probable token of each row of logits, and statistics of each row.

    Returns:
        Four tensors with one value per row: the token, its log-probability, the entropy of the distribution in nats,
        and the margin, which is the probability of the most probable token minus that of the second.
    """
    logp = torch.log_softmax(logits.float(), dim=-1)
    top = logp.topk(2, dim=-1)
    entropy = -(logp.exp() * logp).nan_to_num().sum(dim=-1)  # a forbidden token has p log p = 0 * -inf
    first, second = top.values.unbind(dim=-1)
    return top.indices[:, 0], first, entropy, first.exp() - second.exp()


def sample_rows(
    batch: DecodingBatch,
    uniforms: NDArray[np.float64],
    sampling: Sampling,
    stop_ids: frozenset[int],
    layers: Sequence[int] = (),
    *,
    read_end_token: bool = False,
) -> list[GeneratedAnswer]:
    """Sample one answer per row of the batch.

    Args:
        batch: The decoding batch.
        uniforms: Uniform random numbers (rows x tokens). An answer depends only on its own numbers, not on the batch.
        sampling: Temperature, top_p and top_k.
        stop_ids: Tokens that end an answer.
        layers: Layers whose hidden states at the last token of each answer are stored in `states`.
        read_end_token: If a stop token ended an answer, let the model read this token, too, and store the states there.
    """
    answers = [GeneratedAnswer() for _ in range(len(batch))]
    active = answers  # the answers that are still in the batch, one per row
    _store_states(batch, active, layers)
    for position in range(uniforms.shape[1]):
        is_unfinished = [not answer.finished for answer in answers]
        tokens = draw_tokens(batch.compute_logits(), uniforms[is_unfinished, position], sampling)
        _append_tokens(batch, active, tokens, stop_ids)
        if not read_end_token:
            active = _drop_finished(batch, active)
        _read_new_tokens(batch, active, layers)
        active = _drop_finished(batch, active)
        if not active:
            break
    return answers


def draw_tokens(logits: torch.Tensor, uniforms: NDArray[np.float64], sampling: Sampling) -> list[int]:
    """Draw the next token of each row at random.

    It is the first token with a cumulative probability above the random number.

    Args:
        logits: Logits of the next token (rows x vocabulary).
        uniforms: One random number in [0, 1) per row.
        sampling: Temperature, top_k and top_p.

    Raises:
        ModelError: The logits are not finite.
    """
    numbers = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None]
    tokens, are_finite = draw_tokens_on_device(logits, numbers, sampling)
    if not bool(are_finite):
        raise make_nan_error()
    return list(tokens[:, 0].tolist())


def draw_tokens_on_device(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens by inverse transform sampling, without making the host wait for the device.

    Args:
        logits: Logits of the next token (rows x vocabulary).
        uniforms: Uniform random numbers in [0, 1) (rows x numbers). Each draws one token.
        sampling: Temperature, top_k and top_p.

    Returns:
        The tokens (rows x numbers), and a tensor that tells whether all probabilities are finite.
    """
    scaled = logits if sampling.temperature == 1 else logits.float() / sampling.temperature
    if sampling.keeps_all_tokens:  # neither top_k nor top_p excludes any token
        return _invert_cdf(torch.softmax(scaled, dim=-1, dtype=torch.float32), uniforms, logits.shape[1] - 1)
    # The columns of `probabilities` are sorted. `tokens` has the token of each column.
    probabilities, tokens = filter_top_tokens(scaled.float(), sampling)
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # last column that top_k and top_p keep
    columns, are_finite = _invert_cdf(probabilities, uniforms, last_kept)
    return tokens.gather(1, columns), are_finite


def filter_top_tokens(scaled: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the tokens kept by top_k and top_p, most probable first.

    Some columns may be left that are not kept. They have probability 0. `scaled` are logits divided by the temperature.
    """
    if sampling.top_k:
        logits, tokens = scaled.topk(min(sampling.top_k, scaled.shape[1]))
        probabilities = torch.softmax(logits, dim=-1)
    else:
        probabilities, tokens = _find_top_mass(scaled, sampling.top_p)
    # top_p applies in both cases. A token is kept if the tokens before it do not reach top_p yet.
    sums_before = probabilities.cumsum(dim=-1) - probabilities
    is_kept = sums_before < sampling.top_p
    is_kept[:, 0] = True  # sums are rounded; the most probable token always stays
    # NaN is kept too, so that the caller can detect it.
    return probabilities.where(is_kept | probabilities.isnan(), 0), tokens


def _find_top_mass(scaled: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable tokens of each row: at least as many as have the total probability `mass`.

    The number of tokens is increased step by step, because sorting the whole vocabulary would be slow.
    """
    n_tokens = INITIAL_TOP_P_WIDTH
    vocabulary_size = scaled.shape[1]
    log_total = scaled.logsumexp(dim=-1, keepdim=True)  # normalizes the logits to log-probabilities
    while True:
        values, tokens = scaled.topk(min(n_tokens, vocabulary_size))
        probabilities = (values - log_total).exp()
        if n_tokens >= vocabulary_size or bool((probabilities.sum(dim=-1) >= mass).all()):
            return probabilities, tokens
        n_tokens *= 8


def _invert_cdf(
    probabilities: torch.Tensor, uniforms: torch.Tensor, last_column: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first token with a cumulative probability above each uniform number.

    Args:
        probabilities: Token probabilities (rows x tokens). They need not add up to 1.
        uniforms: Uniform numbers in [0, 1) (rows x numbers).
        last_column: Last column with a token that may be drawn. Rounding could otherwise lead beyond it.

    Returns:
        The columns of the tokens (rows x numbers), and a tensor that tells whether all probabilities are finite.
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    columns = torch.searchsorted(cumulative, uniforms * total, right=True)
    return columns.clamp(max=last_column), torch.isfinite(total).all()
