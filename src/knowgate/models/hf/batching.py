"""Run prompts in batches that fit the memory of the device.

Prompts of similar length share a batch. A GPU may be shared with other programs, so a pass plans for part of the memory
that is free when it starts, and PyTorch is kept from taking all of it. A batch that still runs out of memory is halved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from knowgate.errors import DeviceError, OutOfMemory
from knowgate.types import Result

MAX_FREE_SHARE = 0.6  # of the free memory that a pass may take, including what PyTorch's allocator caches
MAX_TOTAL_SHARE = 0.8  # of the GPU that this process may hold, however much is free
# Share of the free memory that batches are planned for. Growing caches are copied, which can double their memory.
PLANNED_SHARE = 0.25
PLANNED_ANSWER_TOKENS = 64
# cuDNN and cuBLAS have no error of their own for lack of memory: they fail to plan, or to allocate a workspace.
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
RESUME_HINT = "Finished rows are kept: run the same command again to continue"
CPU_DEVICE = torch.device("cpu")
BatchWork = Callable[[list[int]], list[Result]]  # takes the indices of a batch's prompts


@dataclass(frozen=True)
class BatchLimits:
    """How much one batch may hold.

    Args:
        prompts: Number of prompts.
        prompt_tokens: Number of prompt tokens, with padding.
        rows: Number of answers generated in parallel.
        row_tokens: Number of prompt tokens over all answers, if each answer copies the cache of its prompt.
    """

    prompts: int
    prompt_tokens: int
    rows: int
    row_tokens: int | None


CPU_LIMITS = BatchLimits(prompts=64, prompt_tokens=4_096, rows=256, row_tokens=16_384)  # < 1.5 GB for a 135M model
CUDA_LIMITS = BatchLimits(prompts=2_048, prompt_tokens=131_072, rows=8_192, row_tokens=1_000_000)


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in bytes.

    Args:
        free: Free for everybody, or cached by this process but unused.
        used: Used by this process.
        total: Size of the memory.
    """

    free: int
    used: int
    total: int

    @property
    def max_share(self) -> float:
        """Share of the GPU that this process may hold during a pass; never less than it already uses."""
        used = self.used / self.total
        return max(used, min(MAX_TOTAL_SHARE, used + MAX_FREE_SHARE * self.free / self.total))

    @property
    def planned(self) -> float:
        """Bytes to plan a pass for."""
        return PLANNED_SHARE * self.free


def read_gpu_memory(device: torch.device) -> GpuMemory:
    """Measure the memory of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return GpuMemory(free + torch.cuda.memory_reserved(device) - used, used, total)


@contextlib.contextmanager
def limit_gpu_memory(device: torch.device) -> Iterator[None]:
    """Keep PyTorch from taking more of the GPU than `GpuMemory.max_share` while the block runs."""
    if device.type != "cuda":
        yield
        return
    # PyTorch refuses a device without a number here.
    number = torch.cuda.current_device() if device.index is None else device.index
    # Older releases of PyTorch cannot tell the current limit.
    get_limit = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    limit_before = float(get_limit(number)) if get_limit is not None else 1.0
    torch.cuda.set_per_process_memory_fraction(min(limit_before, read_gpu_memory(device).max_share), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(limit_before, number)


@dataclass(frozen=True)
class MemoryCost:
    """Bytes that a model takes per prompt token, per prompt token of an answer, and per answer."""

    prompt_token: int
    row_token: int
    row: int


def estimate_memory_cost(model: Any) -> MemoryCost:
    """Estimate the memory that a pass takes from the sizes in the model's configuration."""
    config = model.config.get_text_config()
    size = torch.empty(0, dtype=model.dtype).element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    cache = 2 * layers * heads * width * size  # keys and values
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    states = (layers + 1) * int(config.hidden_size) * size  # kept if a gate reads a layer
    return MemoryCost(
        prompt_token=2 * cache + states + 4 * inner * size,
        row_token=2 * cache,  # a decoding step copies the cache
        row=4 * 4 * int(config.vocab_size) + PLANNED_ANSWER_TOKENS * cache,  # four float32 arrays of logits
    )


def compute_batch_limits(model: Any, device: torch.device, *, shared: bool = False) -> BatchLimits:
    """Return the batch limits of a device: fixed for the CPU, from the free memory for a GPU.

    Args:
        model: The transformers model.
        device: Where it runs.
        shared: Answers share the cache of their prompt, so they need no memory for copies of it.
    """
    if device.type != "cuda":
        return replace(CPU_LIMITS, row_tokens=None) if shared else CPU_LIMITS
    planned, cost = read_gpu_memory(device).planned, estimate_memory_cost(model)

    def limit(maximum: int, bytes_each: int) -> int:
        return max(1, min(maximum, int(planned / bytes_each)))

    return BatchLimits(
        prompts=CUDA_LIMITS.prompts,
        prompt_tokens=limit(CUDA_LIMITS.prompt_tokens, cost.prompt_token),
        rows=limit(CUDA_LIMITS.rows, cost.row),
        row_tokens=None if shared else limit(CUDA_LIMITS.row_tokens or 1, cost.row_token),
    )


def run_in_batches(
    ids: Sequence[Sequence[int]],
    limits: BatchLimits,
    work: BatchWork[Result],
    rows: int = 1,
    device: torch.device = CPU_DEVICE,
) -> list[Result]:
    """Run `work` on batches of prompts of similar length and return its results in the order of the prompts.

    Args:
        ids: Token ids of each prompt.
        limits: Limits of a batch.
        work: Function from the indices of a batch's prompts to their results.
        rows: Number of answers generated per prompt.
        device: Where the model runs.
    """
    results: dict[int, Result] = {}
    with torch.inference_mode(), limit_gpu_memory(device):
        for batch in split_into_batches([len(row) for row in ids], limits, rows):
            results.update(zip(batch, _run_halving(batch, work), strict=True))
    return [results[index] for index in range(len(ids))]


def split_into_batches(lengths: Sequence[int], limits: BatchLimits, rows: int) -> Iterator[list[int]]:
    """Yield batches of prompt indices, shortest prompts first; a prompt above the limits gets its own batch."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and _exceeds(limits, len(batch) + 1, lengths[index], rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _exceeds(limits: BatchLimits, prompts: int, length: int, rows: int) -> bool:
    """Return whether this many prompts, padded to `length` tokens, exceed a limit."""
    return (
        prompts > limits.prompts
        or prompts * length > limits.prompt_tokens
        or prompts * rows > limits.rows
        or (rows > 1 and limits.row_tokens is not None and prompts * rows * length > limits.row_tokens)
    )


def run_single(work: Callable[[], Result]) -> Result:
    """Run work on one prompt, with inference mode on and device errors translated.

    Inference mode belongs to a thread, so it is entered for each call and never held between two.
    """
    with torch.inference_mode():
        return _run_halving([0], lambda _: [work()])[0]


def _run_halving(batch: list[int], work: BatchWork[Result]) -> list[Result]:
    """Run a batch; if memory runs out, run its halves instead."""
    try:
        with translate_device_errors():
            return work(batch)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        if len(batch) == 1:
            raise OutOfMemory(
                "not enough GPU memory for a single question: end other programs that use the GPU, use a smaller "
                f"model, or shorter or fewer passages. {RESUME_HINT}."
            ) from None
    # Outside the except block, where the error no longer keeps tensors alive.
    torch.cuda.empty_cache()
    middle = len(batch) // 2
    return _run_halving(batch[:middle], work) + _run_halving(batch[middle:], work)


def is_memory_error(error: RuntimeError) -> bool:
    """Return whether a smaller batch may avoid the error."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in MEMORY_ERROR_MARKERS)


@contextlib.contextmanager
def translate_device_errors() -> Iterator[None]:
    """Raise DeviceError for a GPU that has failed; other errors, including lack of memory, pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if is_memory_error(error) or not any(word in str(error) for word in DEVICE_ERROR_MARKERS):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DeviceError(
            f"the GPU failed during a pass ({reason}), and this process cannot use it any more. {RESUME_HINT}; set "
            "CUDA_VISIBLE_DEVICES= (empty) to use the CPU."
        ) from error
