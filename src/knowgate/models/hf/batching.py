"""Run prompts in batches that fit the memory of the device.

Prompts of similar length share a batch. Other programs may use the same GPU. So batches are sized for only a part of the
memory that is free at the start, and PyTorch is limited to a share of the GPU. If a batch still runs out of memory, it is
split into halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from knowgate.core.stop_flag import check_stop_flag
from knowgate.errors import DeviceError, ModelError, OutOfMemory, get_cause
from knowgate.types import Result

MAX_SHARE_OF_AVAILABLE = 0.6  # maximum share of `GpuMemory.available` that a forward pass may take
MAX_TOTAL_SHARE = 0.8  # maximum share of the whole GPU that this process may hold
# Share of `GpuMemory.available` that batches are planned for, from measurements on a GPU. Copies of the cache can double
# what a batch takes.
PLANNED_SHARE = 0.25
PLANNED_ANSWER_TOKENS = 64  # assumed length of an answer when memory is estimated
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
CPU = torch.device("cpu")
BatchWork = Callable[[list[int]], list[Result]]  # takes the indices of a batch's prompts


@dataclass(frozen=True)
class BatchLimits:
    """Maximum sizes of a batch of prompts, so that it fits into memory.

    The cache holds the attention keys and values.

    Args:
        prompts: Maximum number of prompts.
        prompt_tokens: Maximum number of prompt tokens that the model reads in one forward pass, including padding.
        answers: Maximum number of answers, over all prompts.
        copied_tokens: Maximum number of prompt tokens, over all copies of prompts in the cache: one copy per answer. None
            if nothing is copied, because the answers to a prompt share its part of the cache.
        cached_tokens: Maximum number of prompt tokens in the cache, including padding. It may be larger than
            `prompt_tokens`, because several forward passes may fill the cache before answers are generated.
    """

    prompts: int
    prompt_tokens: int
    answers: int
    copied_tokens: int | None
    cached_tokens: int


# Less than 1.5 GB for a model of 135 million parameters.
CPU_LIMITS = BatchLimits(prompts=64, prompt_tokens=4_096, answers=256, copied_tokens=16_384, cached_tokens=4_096)
CUDA_LIMITS = BatchLimits(2_048, prompt_tokens=131_072, answers=8_192, copied_tokens=1_000_000, cached_tokens=1_000_000)


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in bytes.

    Args:
        available: Memory that this process can still use: what no program uses, plus what PyTorch has reserved in this
            process but does not use.
        used_here: Memory that the tensors of this process use.
        total: Size of the GPU's memory.
    """

    available: int
    used_here: int
    total: int

    @property
    def max_share(self) -> float:
        """Maximum share of the GPU's memory for this process.

        Some free memory is left to other programs.
        """
        used_share = self.used_here / self.total
        desired_share = used_share + MAX_SHARE_OF_AVAILABLE * self.available / self.total
        return max(used_share, min(MAX_TOTAL_SHARE, desired_share))  # never less than the process already uses


def read_gpu_memory(device: torch.device) -> GpuMemory:
    """Measure how much memory of a GPU this process uses and can still use, and the total."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    reserved_unused = torch.cuda.memory_reserved(device) - used  # PyTorch holds it for new tensors of this process
    return GpuMemory(available=free + reserved_unused, used_here=used, total=total)


@contextlib.contextmanager
def limit_gpu_memory(device: torch.device) -> Iterator[None]:
    """Limit PyTorch's GPU memory to `GpuMemory.max_share` while the block runs.

    Other programs may use the same GPU.
    """
    if device.type != "cuda":
        yield
        return
    # The device 'cuda' without a number is the current GPU. PyTorch's limit needs the number.
    gpu = torch.cuda.current_device() if device.index is None else device.index
    get_limit = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older releases do not have it
    old_limit = float(get_limit(gpu)) if get_limit is not None else 1.0
    torch.cuda.set_per_process_memory_fraction(min(old_limit, read_gpu_memory(device).max_share), gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(old_limit, gpu)


@dataclass(frozen=True)
class MemoryCost:
    """Estimated memory in bytes for reading prompts and generating answers.

    Args:
        per_prompt_token: Bytes to read one token of a prompt.
        per_cached_token: Bytes to keep the keys and values of one prompt token in the cache. If each answer has its own
            copy of its prompt, every copy needs them.
        per_answer: Bytes for one answer, for its logits and its own tokens.
    """

    per_prompt_token: int
    per_cached_token: int
    per_answer: int


def estimate_memory_cost(model: Any) -> MemoryCost:
    """Estimate roughly how much memory prompts and answers take."""
    config = model.config.get_text_config()
    bytes_per_number = torch.empty(0, dtype=model.dtype).element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    feed_forward_width = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    # Bytes per token. The factor 2 stands for keys and values.
    cache = 2 * layers * heads * head_width * bytes_per_number
    hidden_states = (layers + 1) * int(config.hidden_size) * bytes_per_number  # kept if a gate reads a layer
    feed_forward = 4 * feed_forward_width * bytes_per_number  # about four arrays of this width at once
    logits = 4 * 4 * int(config.vocab_size)  # four arrays of float32 numbers
    # A decoding step copies the cache, so the tokens of prompts count twice. Those of answers, which are few, count once.
    cached_token = 2 * cache
    prompt_token = cached_token + hidden_states + feed_forward
    return MemoryCost(prompt_token, cached_token, per_answer=logits + PLANNED_ANSWER_TOKENS * cache)


def compute_batch_limits(model: Any, device: torch.device, *, shared: bool = False) -> BatchLimits:
    """Return the maximum batch sizes for a device. On a GPU, they depend on the free memory.

    Args:
        model: The transformers model.
        device: The device that the model runs on.
        shared: Whether all answers to a prompt share its keys and values, so that no memory is needed for copies.
    """
    limits = _compute_gpu_limits(model, device) if device.type == "cuda" else CPU_LIMITS
    return replace(limits, copied_tokens=None) if shared else limits


def _compute_gpu_limits(model: Any, device: torch.device) -> BatchLimits:
    """Return the maximum batch sizes for a part of the free GPU memory."""
    planned_bytes = PLANNED_SHARE * read_gpu_memory(device).available
    cost = estimate_memory_cost(model)

    def limit(maximum: int, bytes_each: int) -> int:
        """Return how many items of `bytes_each` bytes fit into the planned memory, from 1 to `maximum`."""
        return max(1, min(maximum, int(planned_bytes / bytes_each)))

    cached_tokens = limit(CUDA_LIMITS.cached_tokens, cost.per_cached_token)
    return BatchLimits(
        prompts=CUDA_LIMITS.prompts,
        prompt_tokens=limit(CUDA_LIMITS.prompt_tokens, cost.per_prompt_token),
        answers=limit(CUDA_LIMITS.answers, cost.per_answer),
        copied_tokens=cached_tokens,
        cached_tokens=cached_tokens,
    )


def run_in_batches(
    ids: Sequence[list[int]], limits: BatchLimits, work: BatchWork[Result], rows: int = 1, device: torch.device = CPU
) -> list[Result]:
    """Run `work` on batches of prompts of similar length and return one result per prompt, in order.

    Args:
        ids: Token ids of each prompt.
        limits: Maximum size of a batch.
        work: Takes the indices of a batch's prompts and returns a result for each. If memory runs out, it is called
            again with half of the batch.
        rows: Number of answers generated per prompt.
        device: Where the model runs.
    """
    results: dict[int, Result] = {}  # by index of the prompt
    with torch.inference_mode(), limit_gpu_memory(device):
        for batch in split_into_batches([len(tokens) for tokens in ids], limits, rows):
            results.update(zip(batch, _run_halving(batch, work), strict=True))
    return [results[index] for index in range(len(ids))]


def split_into_batches(lengths: Sequence[int], limits: BatchLimits, rows: int) -> Iterator[list[int]]:
    """Yield batches of prompt indices, with the shortest prompts first.

    Args:
        lengths: Number of tokens of each prompt.
        limits: Limits of a batch. A single prompt that exceeds them is put into a batch of its own.
        rows: Number of answers per prompt, each of which takes a row of the batch.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and _exceeds(limits, len(batch) + 1, lengths[index], rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _exceeds(limits: BatchLimits, prompts: int, length: int, rows: int) -> bool:
    """Return whether a batch of this size exceeds a limit.

    Args:
        limits: The limits.
        prompts: Number of prompts in the batch.
        length: Number of tokens that each prompt is padded to.
        rows: Number of answers per prompt.
    """
    # Only several answers to a prompt need copies of its keys and values.
    copied_tokens = prompts * rows * length if rows > 1 else 0
    return (
        prompts > limits.prompts
        or prompts * length > limits.prompt_tokens
        or prompts * rows > limits.answers
        or (limits.copied_tokens is not None and copied_tokens > limits.copied_tokens)
    )


def run_single(work: Callable[[], Result]) -> Result:
    """Run the model on one prompt by calling `work`, and return the result.

    GPU errors become DeviceError or OutOfMemory.
    """
    batch_of_one = [0]  # it cannot be halved, so lack of memory raises OutOfMemory
    with torch.inference_mode():
        [result] = _run_halving(batch_of_one, lambda _batch: [work()])
    return result


def _run_halving(batch: list[int], work: BatchWork[Result]) -> list[Result]:
    """Call `work` with a batch of prompt indices.

    If memory runs out, each half is tried instead.

    Raises:
        OutOfMemory: The memory is too small even for a single prompt.
    """
    check_stop_flag()
    try:
        with translate_device_errors():
            return work(batch)
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        if len(batch) == 1:
            raise OutOfMemory(
                "the GPU has too little memory for a single question. Use a smaller model or fewer passages, or stop other GPU "
                f"programs. {RESUME_HINT}."
            ) from None
    # This is outside the except block, because inside it the error would keep tensors alive.
    torch.cuda.empty_cache()
    middle = len(batch) // 2
    return _run_halving(batch[:middle], work) + _run_halving(batch[middle:], work)


def is_memory_error(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, so that a smaller batch may succeed."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in MEMORY_ERROR_MARKERS)


def make_nan_error(output: str = "NaN instead of token probabilities") -> ModelError:
    """Return the error for a model with output that is not finite."""
    return ModelError(
        f"the model returned {output}. Its weights may be damaged, or the number format does not suit it. Download the "
        "weights again, or set KNOWGATE_DTYPE=float32."
    )


@contextlib.contextmanager
def translate_device_errors() -> Iterator[None]:
    """Raise DeviceError if the GPU fails in the block.

    Lack of memory is not translated.
    """
    try:
        yield
    except RuntimeError as error:
        if is_memory_error(error) or not any(word in str(error) for word in DEVICE_ERROR_MARKERS):
            raise
        reason = get_cause(error)
        raise DeviceError(
            f"the GPU failed ({reason}), and this process can no longer use it. {RESUME_HINT}. To use the CPU instead, "
            "set CUDA_VISIBLE_DEVICES= (empty)."
        ) from error


def pad_left(ids: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad token ids on the left to equal length, and make their attention mask.

    The mask is 0 for padding, else 1.
    """
    width = max(map(len, ids))
    # Tokens and mask are in one array, which is copied to the device faster than two.
    tokens_and_mask = np.zeros((2, len(ids), width), dtype=np.int64)
    tokens, mask = tokens_and_mask
    tokens[:] = pad_id
    for row, row_ids in enumerate(ids):
        start = width - len(row_ids)
        tokens[row, start:] = row_ids
        mask[row, start:] = 1
    tensor = torch.from_numpy(tokens_and_mask)
    if device.type == "cuda":  # without pinned memory, the host would wait until the GPU has finished its work
        tensor = tensor.pin_memory()
    return tuple(tensor.to(device, non_blocking=True))


def compute_positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token under an attention mask with padding on the left."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)
