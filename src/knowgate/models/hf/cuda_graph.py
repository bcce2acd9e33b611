"""Replay a decoding step as one CUDA graph, because launching thousands of small kernels takes longer than running them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

import torch

from knowgate.models.hf.batching import is_memory_error
from knowgate.types import Result

log = logging.getLogger(__name__)
GRAPH_DEVICES = {"cuda"}  # kinds of devices that steps are captured on; empty if capturing failed in this process
MIN_REPLAYS = 5  # capturing takes about as long as two calls, so it does not pay for the last few calls


@dataclass
class GraphedStep(Generic[Result]):
    """Runs the same function on a GPU many times, using a CUDA graph.

    The second call captures the function's GPU kernels. Later calls only replay them, on the same tensors.

    Args:
        device: Where the function runs. Only CUDA devices have graphs; elsewhere each call runs the function.
        graph: The CUDA graph; None if there is none yet.
        output: What the captured function returned.
        n_calls: Number of calls so far.
    """

    device: torch.device
    graph: Any = field(default=None, repr=False)
    output: Result | None = field(default=None, repr=False)
    n_calls: int = 0

    def run(self, function: Callable[[], Result], n_calls_left: int) -> Result:
        """Run the function, or replay its captured kernels.

        Args:
            function: The function, the same in every call. It is not stored, because a reference to its tensors would
                keep their memory from being freed.
            n_calls_left: Maximum number of calls from now on, including this one. If they are few, nothing is captured,
                because a capture would take longer than it saves.
        """
        self.n_calls += 1
        if self.device.type not in GRAPH_DEVICES:
            return function()
        if self.n_calls == 1:  # kernels must have run once before they can be captured
            with use_capture_stream(self.device):
                return function()
        if self.n_calls == 2 and n_calls_left >= MIN_REPLAYS:
            self._capture(function)
        if self.graph is None or self.output is None:
            return function()
        self.graph.replay()
        return self.output  # the next call overwrites these tensors

    def _capture(self, function: Callable[[], Result]) -> None:
        """Capture the GPU kernels of the function as `graph`.

        If this fails, there is no graph, and later calls run the function itself.
        """
        try:
            self.graph, self.output = self._capture_with_retry(function)
        except RuntimeError as error:
            _warn(f"{type(error).__name__}: {error}")
            if not is_memory_error(error):
                GRAPH_DEVICES.clear()  # captures are switched off, because every other one would fail, too

    def _capture_with_retry(self, function: Callable[[], Result]) -> tuple[Any, Result]:
        """Capture the function. If memory runs out, free memory and try once more."""
        try:
            return capture_graph(function, self.device)
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
        torch.cuda.empty_cache()  # a capture cannot use memory that earlier graphs have left
        return capture_graph(function, self.device)


@functools.cache  # each reason is logged once
def _warn(reason: str) -> None:
    log.warning("a decoding step was not captured as a CUDA graph, so it may run more slowly. %s", reason)


def capture_graph(function: Callable[[], Result], device: torch.device) -> tuple[Any, Result]:
    """Capture the GPU kernels of a function without running them.

    Unlike `torch.cuda.graph`, this keeps the memory cached by PyTorch.

    Returns:
        The CUDA graph, and what the function returned. Replaying the graph writes to the same tensors again.
    """
    graph = torch.cuda.CUDAGraph()
    with use_capture_stream(device):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = function()
        finally:
            graph.capture_end()
    return graph, output


_open_stream = functools.cache(torch.cuda.Stream)  # returns the same stream in every call for a device


@contextlib.contextmanager
def use_capture_stream(device: torch.device) -> Iterator[None]:
    """Run the block in a separate CUDA stream.

    CUDA cannot capture the default stream. The order of work stays the same.
    """
    stream = _open_stream(device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
