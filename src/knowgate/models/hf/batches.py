"""Prompts of like length into batches that fit the memory, and the results back into order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from knowgate.errors import ModelError
from knowgate.types import Result

Work = Callable[[list[int]], list[Result]]


@dataclass(frozen=True)
class Limits:
    """How much one batch may hold. CPU figures keep the peak memory of a 135M model under 1.5 GB."""

    prompts: int
    prompt_tokens: int
    rows: int  # answers generated side by side
    row_tokens: int  # their prompts' tokens: every sampled answer holds a copy of its prompt's keys and values


CPU = Limits(prompts=64, prompt_tokens=4_096, rows=256, row_tokens=16_384)
CUDA = Limits(prompts=256, prompt_tokens=131_072, rows=8_192, row_tokens=1_000_000)


def limits_of(device: torch.device) -> Limits:
    return CUDA if device.type == "cuda" else CPU


def run_batched(ids: Sequence[Sequence[int]], limits: Limits, work: Work[Result], rows: int = 1) -> list[Result]:
    """Run `work` on batches of like length; `rows` is how many answers each prompt gets."""
    results: dict[int, Result] = {}
    with torch.inference_mode():
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
        or (rows > 1 and prompts * rows * length > limits.row_tokens)
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
        return work(places)
    except torch.cuda.OutOfMemoryError:
        if len(places) == 1:
            raise ModelError("not enough GPU memory for a single question: use a smaller model.") from None
    torch.cuda.empty_cache()
    middle = len(places) // 2
    return _halving(places[:middle], work) + _halving(places[middle:], work)
