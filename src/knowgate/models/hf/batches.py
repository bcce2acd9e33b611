"""Prompts of like length into batches that fit the memory, and the results back into order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from knowgate.models.hf.memory import appetite, held_back, is_pressure, out_of_memory, room, told
from knowgate.types import Result

Work = Callable[[list[int]], list[Result]]


@dataclass(frozen=True)
class Limits:
    """How much one batch may hold. CPU figures keep the peak memory of a 135M model under 1.5 GB."""

    prompts: int
    prompt_tokens: int
    rows: int  # answers generated side by side
    row_tokens: int | None  # their prompts' tokens, where every sampled answer holds a copy of its prompt's cache


HOST = torch.device("cpu")
CPU = Limits(prompts=64, prompt_tokens=4_096, rows=256, row_tokens=16_384)
CUDA = Limits(prompts=2_048, prompt_tokens=131_072, rows=8_192, row_tokens=1_000_000)


def limits_of(model: Any, device: torch.device, *, shared: bool = False) -> Limits:
    """Fixed on a CPU; on a GPU what the memory that is free now has room for, and no more than keeps it busy.

    shared: answers share their prompts' keys and values, so they need no room for copies of them.
    """
    if device.type != "cuda":
        return replace(CPU, row_tokens=None) if shared else CPU
    planned, needs = room(device).planned, appetite(model)
    return Limits(
        prompts=CUDA.prompts,
        prompt_tokens=_at_most(CUDA.prompt_tokens, planned / needs.prompt_token),
        rows=_at_most(CUDA.rows, planned / needs.row),
        row_tokens=None if shared else _at_most(CUDA.row_tokens or 1, planned / needs.row_token),
    )


def _at_most(usual: int, room_for: float) -> int:
    return max(1, min(usual, int(room_for)))


def run_batched(
    ids: Sequence[Sequence[int]], limits: Limits, work: Work[Result], rows: int = 1, device: torch.device = HOST
) -> list[Result]:
    """Run `work` on batches of like length; `rows` is how many answers each prompt gets."""
    results: dict[int, Result] = {}
    with torch.inference_mode(), held_back(device):
        for places in batches([len(row) for row in ids], limits, rows):
            results.update(zip(places, _halving(places, work), strict=True))
    return [results[place] for place in range(len(ids))]


def batches(lengths: Sequence[int], limits: Limits, rows: int) -> Iterator[list[int]]:
    """Places of prompts, shortest first, cut so that no batch exceeds a limit; a giant gets a batch of its own."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if batch and _exceeds(limits, len(batch) + 1, lengths[place], rows):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _exceeds(limits: Limits, prompts: int, length: int, rows: int) -> bool:
    return (
        prompts > limits.prompts
        or prompts * length > limits.prompt_tokens
        or prompts * rows > limits.rows
        or (rows > 1 and limits.row_tokens is not None and prompts * rows * length > limits.row_tokens)
    )


def run_alone(work: Callable[[], Result]) -> Result:
    """Work on a single question, which cannot be cut in two.

    Inference mode belongs to a thread: it is entered for each piece of work and never held between two.
    """
    with torch.inference_mode():
        return _halving([0], lambda _: [work()])[0]


def _halving(places: list[int], work: Work[Result]) -> list[Result]:
    """A batch too big for the GPU is cut in two until it fits."""
    try:
        with told():
            return work(places)
    except RuntimeError as error:
        if not is_pressure(error):
            raise
        if len(places) == 1:
            raise out_of_memory() from None
    torch.cuda.empty_cache()  # here the error and the tensors it held are gone
    middle = len(places) // 2
    return _halving(places[:middle], work) + _halving(places[middle:], work)
