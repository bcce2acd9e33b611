"""Drafts and samples from one prefill, chosen on the device: the host looks only now and then whether rows have ended.

The same answers as `decoding` gives, where nobody goes on from them later. What was chosen stays on the device until all
is done, and answers that have ended are left behind a few at a time. Knows tensors; not prompts, gates or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from knowgate.models.hf.decoding import Row, Step, Stream, statistics
from knowgate.models.hf.drawing import draw_on_device, no_numbers
from knowgate.models.hf.shared import SharedStream, branch_off
from knowgate.types import Sampling

NOTHING = -1  # in place of a token: the answer had ended
PATIENCE = {"cpu": 1}  # steps between two looks; a look at another device makes it wait for the host
USUAL_PATIENCE = 4
WORTH_LEAVING = 0.9  # of the rows: where more are going on, leaving the others costs more than taking them along


@dataclass
class Growth:
    """What was chosen for each row, by its number; `is_fed` (prompts x answers) says whose next token is of the answer.

    past_end: the token that ends an answer is fed, too, and the states are those at it.
    """

    stream: SharedStream
    stop: torch.Tensor
    tokens: torch.Tensor
    has_ended: torch.Tensor
    is_alive: torch.Tensor
    is_fed: torch.Tensor
    past_end: bool = False
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    are_finite: list[torch.Tensor] = field(default_factory=list)

    def take(self, chosen: torch.Tensor, position: int) -> None:
        """A token for each answer; those of answers that had ended count for nothing."""
        rows, ends = self.stream.rows, torch.isin(chosen, self.stop)
        going = self.is_alive & ~ends
        self.tokens[rows, position] = chosen.where(going, torch.full_like(chosen, NOTHING))
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
        if len(kept) * width > WORTH_LEAVING * fed.size:
            return chosen
        device = chosen.device
        first = torch.tensor(np.argsort(~fed[kept], axis=1, kind="stable")[:, :width], device=device)
        prompts = torch.tensor(kept, device=device)
        places = prompts[:, None]
        self.stream.select(None if len(kept) == len(fed) else prompts, places, first)
        self.is_alive, self.is_fed = self.is_alive[places, first], self.is_fed[places, first]
        return chosen[places, first]

    def rows(self) -> list[Row]:
        """The answers, in order of their numbers. States leave the device in one piece."""
        self.check()
        after = {layer: block.float().cpu() for layer, block in self.states.items()}
        ended: list[bool] = self.has_ended.tolist()
        return [
            Row(tokens=_until_nothing(tokens), finished=ended[i], after={layer: after[layer][i] for layer in after})
            for i, tokens in enumerate(self.tokens.tolist())
        ]

    def check(self) -> None:
        if self.are_finite and not bool(torch.stack(self.are_finite).all()):
            raise no_numbers()
        self.are_finite = []


Choose = Callable[[torch.Tensor, int], torch.Tensor]  # logits (prompts x answers x vocabulary), position -> tokens


def draft(stream: Stream, max_tokens: int, stop: frozenset[int], layers: Sequence[int] = ()) -> list[Row]:
    """The greedy answer of each prompt with its statistics; with `layers`, the states at its last token."""
    if not max_tokens:
        return [Row(after=dict(zip(layers, states, strict=True))) for states in _prompt_states(stream, layers)]
    growth = _begin(stream, 1, max_tokens, stop)
    figures = torch.zeros(3, len(stream), max_tokens, device=stream.mask.device)

    def choose(logits: torch.Tensor, position: int) -> torch.Tensor:
        tokens, *values = statistics(logits[:, 0])
        growth.are_finite.append(torch.isfinite(values[0]).all())
        figures[:, growth.stream.rows[:, 0], position] = torch.stack(values)
        return tokens[:, None]

    _grow(growth, stream, max_tokens, choose, layers)
    rows = growth.rows()
    for row, logprobs, entropies, margins in zip(rows, *figures.tolist(), strict=True):
        row.steps = [Step(*step) for step in zip(row.tokens, logprobs, entropies, margins, strict=False)]
    return rows


def sample(
    stream: Stream,
    uniforms: NDArray[np.float64],
    sampling: Sampling,
    stop: frozenset[int],
    layers: Sequence[int] = (),
    *,
    past_end: bool = False,
) -> list[Row]:
    """As many answers for each prompt as it has rows of uniform numbers (rows x tokens); see `decoding.sample`."""
    answers = len(uniforms) // len(stream)
    growth = _begin(stream, answers, uniforms.shape[1], stop, past_end=past_end)
    numbers = torch.tensor(uniforms, dtype=torch.float32, device=stream.mask.device)

    def choose(logits: torch.Tensor, position: int) -> torch.Tensor:
        wanted = numbers[growth.stream.rows, position]
        shape = (-1, wanted.shape[1]) if logits.shape[1] == 1 else (-1, 1)  # a prompt's first tokens share its logits
        tokens, are_finite = draw_on_device(logits.flatten(0, 1), wanted.reshape(shape), sampling)
        growth.are_finite.append(are_finite)
        return tokens.view_as(wanted)

    _grow(growth, stream, uniforms.shape[1], choose, layers)
    return growth.rows()


def _begin(stream: Stream, answers: int, room: int, stop: frozenset[int], *, past_end: bool = False) -> Growth:
    device, prompts = stream.mask.device, len(stream)
    everybody = torch.ones(prompts, answers, dtype=torch.bool, device=device)
    return Growth(
        branch_off(stream.model, stream.cache, stream.mask, answers, room),
        torch.tensor(sorted(stop), dtype=torch.long, device=device),
        torch.full((prompts * answers, room), NOTHING, device=device),
        torch.zeros(prompts * answers, dtype=torch.bool, device=device),
        everybody,
        everybody,
        past_end,
    )


def _grow(growth: Growth, stream: Stream, max_tokens: int, choose: Choose, layers: Sequence[int]) -> None:
    patience = PATIENCE.get(stream.mask.device.type, USUAL_PATIENCE)
    logits = stream.ready(layers)[:, None]
    growth.remember({layer: stream.hidden[layer][:, None].expand(*growth.is_fed.shape, -1) for layer in layers})
    for position in range(max_tokens):
        chosen: torch.Tensor | None = choose(logits, position)
        growth.take(chosen, position)
        is_last = position == max_tokens - 1
        if is_last and not layers:
            return
        if position % patience == patience - 1 or is_last:
            growth.check()
            chosen = growth.leave_behind(chosen)
        if chosen is None:
            return
        logits, hidden = growth.stream.feed(chosen, layers)
        growth.remember(hidden)


def _prompt_states(stream: Stream, layers: Sequence[int]) -> list[list[torch.Tensor]]:
    if layers:
        stream.ready(layers)
    states = [stream.hidden[layer].float().cpu() for layer in layers]
    return [[state[i] for state in states] for i in range(len(stream))]


def _until_nothing(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NOTHING)] if NOTHING in tokens else tokens
