"""The memory of a GPU: how much of it a pass may take, and what its errors mean.

A GPU is shared: a pass may take a part of what is free at its start and never all of it, whatever other processes do
with theirs. Errors are of three kinds: too little memory (fewer rows at a time may fit), a GPU that has failed (nothing
more can be computed in this process), and those that are none of the GPU's. Knows no batches and no prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from knowgate.errors import DeviceError, OutOfMemory

SHARE = 0.6  # of the free memory, at most, with all that the allocator keeps for later
MOST = 0.8  # of the card, whatever is free
PLANNED = 0.25  # of it, by what a pass is known to need; caches grow by copies, which leaves as much again unusable
# cuDNN and cuBLAS have no error for memory: under pressure they find no plan, or fail to get their workspace
PRESSURE = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "No execution plans support the graph",
    "unable to find an engine",
)
FAILED = (
    "CUDA error",
    "CUDA driver error",
    "device-side assert",
    "illegal memory access",
    "CUDNN_STATUS",
    "CUBLAS_STATUS",
)
GO_ON = "What was finished is kept: the same command goes on from there"


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU: free for anybody or kept by us unused, in use by us, and in all."""

    free: int
    used: int
    total: int

    @property
    def most(self) -> float:
        """The share of the card that this process may hold during a pass; what it holds already is not taken away."""
        held = self.used / self.total
        return max(held, min(MOST, held + SHARE * self.free / self.total))

    @property
    def planned(self) -> float:
        """Bytes to plan a pass for."""
        return PLANNED * self.free


def room(device: torch.device) -> Room:
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return Room(free + torch.cuda.memory_reserved(device) - used, used, total)


@contextlib.contextmanager
def held_back(device: torch.device) -> Iterator[None]:
    """While the block runs, PyTorch takes no more of the GPU than `Room.most`; before that it reuses what it has."""
    if device.type != "cuda":
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index  # PyTorch refuses a plain 'cuda'
    before = _allowed(number)
    torch.cuda.set_per_process_memory_fraction(min(before, room(device).most), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, number)


def _allowed(number: int) -> float:
    """The share of the card that PyTorch may take now; older releases do not tell."""
    asked = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(asked(number)) if asked is not None else 1.0


@dataclass(frozen=True)
class Appetite:
    """Bytes a model takes: for each token of a prompt, of a row that is generated, and for each such row."""

    prompt_token: int
    row_token: int
    row: int


ANSWER = 64  # tokens of an answer to have room for


def appetite(model: Any) -> Appetite:
    """Worked out from the model's sizes."""
    config = model.config.get_text_config()
    size = torch.empty(0, dtype=model.dtype).element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    cache = 2 * layers * heads * width * size  # keys and values
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    states = (layers + 1) * int(config.hidden_size) * size  # kept where a gate reads a layer
    return Appetite(
        prompt_token=2 * cache + states + 4 * inner * size,
        row_token=2 * cache,  # a step writes a longer copy beside the cache it replaces
        row=4 * 4 * int(config.vocab_size) + ANSWER * cache,  # logits and what is made of them, in four bytes
    )


def is_pressure(error: RuntimeError) -> bool:
    """Whether fewer rows at a time may help."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in PRESSURE)


def out_of_memory() -> OutOfMemory:
    return OutOfMemory(
        "not enough GPU memory for a single question: end other programs that use the GPU, use a smaller model, or "
        f"shorter or fewer passages. {GO_ON}."
    )


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A GPU that has failed is said in a sentence; other errors go through, those of memory too."""
    try:
        yield
    except RuntimeError as error:
        if is_pressure(error) or not any(word in str(error) for word in FAILED):
            raise
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise DeviceError(
            f"the GPU failed in the middle of a pass ({first}), and nothing more can be computed in this process. "
            f"{GO_ON}; CUDA_VISIBLE_DEVICES= runs it on the CPU."
        ) from error
