"""Prompts of like length into batches that fit the memory, and the results back into order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from knowgate.errors import DeviceError, OutOfMemory
from knowgate.types import Result

MAX_FREE_SHARE = 0.6  # of the free memory, at most, with all that the allocator keeps for later
MAX_TOTAL_SHARE = 0.8  # of the card, whatever is free
PLANNED_SHARE = (
    0.25  # of it, by what a pass is known to need; caches grow by copies, which leaves as much again unusable
)
# cuDNN and cuBLAS have no error for memory: under pressure they find no plan, or fail to get their workspace
MEMORY_ERROR_MARKERS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "No execution plans support the graph",
    "unable to find an engine",
)
DEVICE_ERROR_MARKERS = (
    "CUDA error",
    "CUDA driver error",
    "device-side assert",
    "illegal memory access",
    "CUDNN_STATUS",
    "CUBLAS_STATUS",
)
RESUME_HINT = "What was finished is kept: the same command goes on from there"


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU: free for anybody or kept by us unused, in use by us, and in all."""

    free: int
    used: int
    total: int

    @property
    def most(self) -> float:
        """The share of the card that this process may hold during a pass; what it holds already is not taken away."""
        held = self.used / self.total
        return max(held, min(MAX_TOTAL_SHARE, held + MAX_FREE_SHARE * self.free / self.total))

    @property
    def planned(self) -> float:
        """Bytes to plan a pass for."""
        return PLANNED_SHARE * self.free


def read_gpu_memory(device: torch.device) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return GpuMemory(free + torch.cuda.memory_reserved(device) - used, used, total)


@contextlib.contextmanager
def limit_gpu_memory(device: torch.device) -> Iterator[None]:
    """While the block runs, PyTorch takes no more of the GPU than `Room.most`; before that it reuses what it has."""
    if device.type != "cuda":
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index  # PyTorch refuses a plain 'cuda'
    before = _allowed(number)
    torch.cuda.set_per_process_memory_fraction(min(before, read_gpu_memory(device).most), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, number)


def _allowed(number: int) -> float:
    """The share of the card that PyTorch may take now; older releases do not tell."""
    asked = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(asked(number)) if asked is not None else 1.0


@dataclass(frozen=True)
class MemoryCost:
    """Bytes a model takes: for each token of a prompt, of a row that is generated, and for each such row."""

    prompt_token: int
    row_token: int
    row: int


PLANNED_ANSWER_TOKENS = 64  # tokens of an answer to have room for


def estimate_memory_cost(model: Any) -> MemoryCost:
    """Worked out from the model's sizes."""
    config = model.config.get_text_config()
    size = torch.empty(0, dtype=model.dtype).element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    cache = 2 * layers * heads * width * size  # keys and values
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    states = (layers + 1) * int(config.hidden_size) * size  # kept where a gate reads a layer
    return MemoryCost(
        prompt_token=2 * cache + states + 4 * inner * size,
        row_token=2 * cache,  # a step writes a longer copy beside the cache it replaces
        row=4 * 4 * int(config.vocab_size)
        + PLANNED_ANSWER_TOKENS * cache,  # logits and what is made of them, in four bytes
    )


def is_memory_error(error: RuntimeError) -> bool:
    """Whether fewer rows at a time may help."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in MEMORY_ERROR_MARKERS)


def make_memory_error() -> OutOfMemory:
    return OutOfMemory(
        "not enough GPU memory for a single question: end other programs that use the GPU, use a smaller model, or "
        f"shorter or fewer passages. {RESUME_HINT}."
    )


@contextlib.contextmanager
def translate_device_errors() -> Iterator[None]:
    """A GPU that has failed is said in a sentence; other errors go through, those of memory too."""
    try:
        yield
    except RuntimeError as error:
        if is_memory_error(error) or not any(word in str(error) for word in DEVICE_ERROR_MARKERS):
            raise
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise DeviceError(
            f"the GPU failed in the middle of a pass ({first}), and nothing more can be computed in this process. "
            f"{RESUME_HINT}; CUDA_VISIBLE_DEVICES= runs it on the CPU."
        ) from error


BatchWork = Callable[[list[int]], list[Result]]


@dataclass(frozen=True)
class BatchLimits:
    """How much one batch may hold. CPU figures keep the peak memory of a 135M model under 1.5 GB."""

    prompts: int
    prompt_tokens: int
    rows: int  # answers generated side by side
    row_tokens: int | None  # their prompts' tokens, where every sampled answer holds a copy of its prompt's cache


CPU_DEVICE = torch.device("cpu")
CPU_LIMITS = BatchLimits(prompts=64, prompt_tokens=4_096, rows=256, row_tokens=16_384)
CUDA_LIMITS = BatchLimits(prompts=2_048, prompt_tokens=131_072, rows=8_192, row_tokens=1_000_000)


def compute_batch_limits(model: Any, device: torch.device, *, shared: bool = False) -> BatchLimits:
    """Fixed on a CPU; on a GPU what the memory that is free now has room for, and no more than keeps it busy.

    shared: answers share their prompts' keys and values, so they need no room for copies of them.
    """
    if device.type != "cuda":
        return replace(CPU_LIMITS, row_tokens=None) if shared else CPU_LIMITS
    planned, needs = read_gpu_memory(device).planned, estimate_memory_cost(model)
    return BatchLimits(
        prompts=CUDA_LIMITS.prompts,
        prompt_tokens=_at_most(CUDA_LIMITS.prompt_tokens, planned / needs.prompt_token),
        rows=_at_most(CUDA_LIMITS.rows, planned / needs.row),
        row_tokens=None if shared else _at_most(CUDA_LIMITS.row_tokens or 1, planned / needs.row_token),
    )


def _at_most(usual: int, room_for: float) -> int:
    return max(1, min(usual, int(room_for)))


def run_in_batches(
    ids: Sequence[Sequence[int]],
    limits: BatchLimits,
    work: BatchWork[Result],
    rows: int = 1,
    device: torch.device = CPU_DEVICE,
) -> list[Result]:
    """Run `work` on batches of like length; `rows` is how many answers each prompt gets."""
    results: dict[int, Result] = {}
    with torch.inference_mode(), limit_gpu_memory(device):
        for places in split_into_batches([len(row) for row in ids], limits, rows):
            results.update(zip(places, _halving(places, work), strict=True))
    return [results[place] for place in range(len(ids))]


def split_into_batches(lengths: Sequence[int], limits: BatchLimits, rows: int) -> Iterator[list[int]]:
    """Places of prompts, shortest first, cut so that no batch exceeds a limit; a giant gets a batch of its own."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if batch and _exceeds(limits, len(batch) + 1, lengths[place], rows):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _exceeds(limits: BatchLimits, prompts: int, length: int, rows: int) -> bool:
    return (
        prompts > limits.prompts
        or prompts * length > limits.prompt_tokens
        or prompts * rows > limits.rows
        or (rows > 1 and limits.row_tokens is not None and prompts * rows * length > limits.row_tokens)
    )


def run_single(work: Callable[[], Result]) -> Result:
    """Work on a single question, which cannot be cut in two.

    Inference mode belongs to a thread: it is entered for each piece of work and never held between two.
    """
    with torch.inference_mode():
        return _halving([0], lambda _: [work()])[0]


def _halving(places: list[int], work: BatchWork[Result]) -> list[Result]:
    """A batch too big for the GPU is cut in two until it fits."""
    try:
        with translate_device_errors():
            return work(places)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        if len(places) == 1:
            raise make_memory_error() from None
    torch.cuda.empty_cache()  # here the error and the tensors it held are gone
    middle = len(places) // 2
    return _halving(places[:middle], work) + _halving(places[middle:], work)
