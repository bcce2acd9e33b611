"""Drafts and samples from one prefill, chosen on the device: the host looks only now and then whether rows have ended.

The same answers as `decoding` gives, where nobody goes on from them later. What was chosen stays on the device until
all is done, and answers that have ended are left behind a few at a time. Knows tensors; not prompts, gates or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from knowgate.models.hf.decoding import (
    DecodedRow,
    DecodingBatch,
    TokenStep,
    compute_step_statistics,
    draw_tokens_on_device,
    make_nan_error,
)
from knowgate.models.hf.forward_pass import SharedDecodingBatch, start_shared_decoding
from knowgate.types import Sampling

NO_TOKEN = -1  # in place of a token: the answer had ended
CHECK_INTERVALS = {"cpu": 1}  # steps between two looks; a look at another device makes it wait for the host
DEFAULT_CHECK_INTERVAL = 4
COMPACTION_THRESHOLD = 0.9  # of the rows: where more are going on, leaving the others costs more than taking them along


@dataclass
class SharedGeneration:
    """What was chosen for each row, by its number; `is_fed` (prompts x answers) says whose next token is of the answer.

    past_end: the token that ends an answer is fed, too, and the states are those at it.
    """

    stream: SharedDecodingBatch
    stop: torch.Tensor
    tokens: torch.Tensor
    has_ended: torch.Tensor
    is_alive: torch.Tensor
    is_fed: torch.Tensor
    per_prompt: int
    drafts: torch.Tensor  # where among `stream.rows`, read line by line, the drafts are that go on
    past_end: bool = False
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    are_finite: list[torch.Tensor] = field(default_factory=list)

    def take(self, chosen: torch.Tensor, position: int) -> None:
        """A token for each answer; those of answers that had ended count for nothing."""
        rows, ends = self.stream.rows, torch.isin(chosen, self.stop)
        going = self.is_alive & ~ends
        self.tokens[rows, position] = chosen.where(going, torch.full_like(chosen, NO_TOKEN))
        self.has_ended[rows] |= self.is_alive & ends
        self.is_fed = self.is_alive if self.past_end else going
        self.is_alive = going

    def remember(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """The states at the tokens fed last; of answers that had ended, earlier ones stay."""
        rows = self.stream.rows
        for layer, state in hidden.items():
            block = self.states.setdefault(layer, state.new_zeros(self.tokens.shape[0], state.shape[-1]))
            block[rows] = state.where(self.is_fed[..., None], block[rows])

    def leave_behind(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Drop answers that need no more, if they are many. Gives the tokens to feed, or None where nobody goes on."""
        fed = self.is_fed.cpu().numpy()
        per_prompt = fed.sum(axis=1)
        if not fed.any():
            return None
        kept = np.flatnonzero(per_prompt)
        width = int(per_prompt.max())
        if len(kept) * width > COMPACTION_THRESHOLD * fed.size:
            return chosen
        device = chosen.device
        first = torch.tensor(np.argsort(~fed[kept], axis=1, kind="stable")[:, :width], device=device)
        prompts = torch.tensor(kept, device=device)
        places = prompts[:, None]
        self.stream.select(None if len(kept) == len(fed) else prompts, places, first)
        self.is_alive, self.is_fed = self.is_alive[places, first], self.is_fed[places, first]
        if len(self.drafts):
            self.drafts = (self.stream.rows.flatten() % self.per_prompt == 0).nonzero()[:, 0]
        return chosen[places, first]

    def rows(self) -> list[DecodedRow]:
        """The answers, in order of their numbers. States leave the device in one piece."""
        self.check()
        after = {layer: block.float().cpu() for layer, block in self.states.items()}
        ended: list[bool] = self.has_ended.tolist()
        return [
            DecodedRow(
                tokens=_until_nothing(tokens), finished=ended[i], after={layer: after[layer][i] for layer in after}
            )
            for i, tokens in enumerate(self.tokens.tolist())
        ]

    def check(self) -> None:
        if self.are_finite and not bool(torch.stack(self.are_finite).all()):
            raise make_nan_error()
        self.are_finite = []


@dataclass
class TokenChooser:
    """How tokens are chosen: by uniform numbers (rows x tokens), greedily for drafts, whose statistics are `figures`
    (3 x prompts x tokens), or both: a prompt's first answer is then the draft."""

    growth: SharedGeneration
    numbers: torch.Tensor
    sampling: Sampling | None
    figures: torch.Tensor | None

    def __call__(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """logits: prompts x answers x vocabulary; at first the answers of a prompt share its own."""
        rows, flat = self.growth.stream.rows, logits.flatten(0, 1)
        if self.sampling is None:
            tokens = torch.empty_like(rows)
        else:
            wanted = self.numbers[rows, position].view(len(flat), -1)
            tokens, are_finite = draw_tokens_on_device(flat, wanted, self.sampling)
            tokens = tokens.view_as(rows)
            self.growth.are_finite.append(are_finite)
        if self.figures is not None:
            self._draft(flat, tokens, position)
        return tokens

    def _draft(self, flat: torch.Tensor, tokens: torch.Tensor, position: int) -> None:
        rows, places, figures = self.growth.stream.rows, self.growth.drafts, self.figures
        if not len(places) or figures is None:
            return
        chosen, *values = compute_step_statistics(flat if len(flat) == len(places) else flat[places])
        self.growth.are_finite.append(torch.isfinite(values[0]).all())
        tokens.view(-1)[places] = chosen
        figures[:, rows.view(-1)[places] // self.growth.per_prompt, position] = torch.stack(values)


@dataclass(frozen=True)
class DraftsAndSamples:
    """The draft of each prompt, and the samples of all, one prompt's after another's."""

    drafts: list[DecodedRow]
    samples: list[DecodedRow]


def draft_shared(
    stream: DecodingBatch, max_tokens: int, stop: frozenset[int], layers: Sequence[int] = ()
) -> list[DecodedRow]:
    """The greedy answer of each prompt with its statistics; with `layers`, the states at its last token."""
    if not max_tokens:
        return [DecodedRow(after=dict(zip(layers, states, strict=True))) for states in _prompt_states(stream, layers)]
    numbers = np.empty((0, max_tokens))
    return _grow(_begin(stream, numbers, None, stop, has_draft=True), stream, layers).drafts


def sample_shared(
    stream: DecodingBatch,
    uniforms: NDArray[np.float64],
    sampling: Sampling,
    stop: frozenset[int],
    layers: Sequence[int] = (),
    *,
    past_end: bool = False,
) -> list[DecodedRow]:
    """As many answers for each prompt as it has rows of uniform numbers (rows x tokens); see `decoding.sample`."""
    return _grow(_begin(stream, uniforms, sampling, stop, past_end=past_end), stream, layers).samples


def draft_and_sample_shared(
    stream: DecodingBatch,
    uniforms: NDArray[np.float64],
    sampling: Sampling,
    stop: frozenset[int],
    layers: Sequence[int] = (),
) -> DraftsAndSamples:
    """Both side by side, of equal length: a step takes all of them. `layers`: states at the ends of all answers."""
    return _grow(_begin(stream, uniforms, sampling, stop, has_draft=True), stream, layers)


def _begin(
    stream: DecodingBatch,
    uniforms: NDArray[np.float64],
    sampling: Sampling | None,
    stop: frozenset[int],
    *,
    has_draft: bool = False,
    past_end: bool = False,
) -> TokenChooser:
    device, prompts, room = stream.mask.device, len(stream), uniforms.shape[1]
    numbers = torch.tensor(uniforms, dtype=torch.float32, device=device).view(prompts, -1, room)
    if has_draft:
        numbers = torch.cat([numbers.new_zeros(prompts, 1, room), numbers], dim=1)
    answers = numbers.shape[1]
    everybody = torch.ones(prompts, answers, dtype=torch.bool, device=device)
    growth = SharedGeneration(
        start_shared_decoding(stream.model, stream.cache, stream.mask, answers, room),
        torch.tensor(sorted(stop), dtype=torch.long, device=device),
        torch.full((prompts * answers, room), NO_TOKEN, device=device),
        torch.zeros(prompts * answers, dtype=torch.bool, device=device),
        everybody,
        everybody,
        answers,
        torch.arange(prompts if has_draft else 0, device=device) * answers,
        past_end,
    )
    figures = torch.zeros(3, prompts, room, device=device) if has_draft else None
    return TokenChooser(growth, numbers.flatten(0, 1), sampling, figures)


def _grow(choice: TokenChooser, stream: DecodingBatch, layers: Sequence[int]) -> DraftsAndSamples:
    growth, max_tokens = choice.growth, choice.numbers.shape[1]
    patience = CHECK_INTERVALS.get(stream.mask.device.type, DEFAULT_CHECK_INTERVAL)
    logits = stream.ready(layers)[:, None]
    growth.remember({layer: stream.hidden[layer][:, None].expand(*growth.is_fed.shape, -1) for layer in layers})
    for position in range(max_tokens):
        chosen: torch.Tensor | None = choice(logits, position)
        growth.take(chosen, position)
        is_last = position == max_tokens - 1
        if is_last and not layers:
            break
        if position % patience == patience - 1 or is_last:
            growth.check()
            chosen = growth.leave_behind(chosen)
        if chosen is None:
            break
        logits, hidden = growth.stream.feed(chosen, layers)
        growth.remember(hidden)
    return _grown(choice)


def _grown(choice: TokenChooser) -> DraftsAndSamples:
    rows = choice.growth.rows()
    if choice.figures is None:
        return DraftsAndSamples([], rows)
    per_prompt = choice.growth.per_prompt
    drafts = rows[::per_prompt]
    for row, logprobs, entropies, margins in zip(drafts, *choice.figures.tolist(), strict=True):
        row.steps = [TokenStep(*step) for step in zip(row.tokens, logprobs, entropies, margins, strict=False)]
    return DraftsAndSamples(drafts, [row for number, row in enumerate(rows) if number % per_prompt])


def _prompt_states(stream: DecodingBatch, layers: Sequence[int]) -> list[list[torch.Tensor]]:
    if layers:
        stream.ready(layers)
    states = [stream.hidden[layer].float().cpu() for layer in layers]
    return [[state[i] for state in states] for i in range(len(stream))]


def _until_nothing(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
