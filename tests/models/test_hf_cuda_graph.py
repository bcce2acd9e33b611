"""Replayed decoding steps give the answers of steps that are run one by one, and a failed capture changes nothing."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from knowgate.models.hf import cuda_graph, shared_decoding
from knowgate.models.hf.cuda_graph import GraphedStep
from knowgate.models.hf.model import HFModel
from knowgate.types import Sampling, SignalRequest
from tests.models.test_hf_shared_decoding import MANY, PROMPTS, assert_alike, like
from tests.support.tiny_models import save_tiny_llama

CPU = torch.device("cpu")


class RecordedOperations(TorchDispatchMode):
    """Records the operations of a block with their tensors, as a CUDA graph does, and undoes what the block wrote.

    `replay` runs them again on the same tensors. Whatever the block computed on the host stays as it was.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.written, self.n_replays = [], {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.setdefault(id(value), (value, value.clone()))
        output = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, output))
        return output

    def undo(self):
        for tensor, before in self.written.values():
            tensor.copy_(before)

    def replay(self):
        self.n_replays += 1
        for func, args, kwargs, output in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """Capture steps on the CPU; returns the list of captured graphs."""
    captured = []

    def capture(function, device):
        graph = RecordedOperations()
        with graph:
            output = function()
        graph.undo()
        captured.append(graph)
        return graph, output

    monkeypatch.setattr(cuda_graph, "GRAPH_DEVICES", {"cpu"})
    monkeypatch.setattr(cuda_graph, "use_capture_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    return captured


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"))))


@pytest.mark.parametrize("stop", [MANY, frozenset()])
@pytest.mark.parametrize(("samples", "sampling"), [(0, Sampling()), (6, Sampling()), (6, Sampling(0.7, top_k=5))])
def test_replayed_steps_give_the_same_answers(model, graphs, stop, samples, sampling, monkeypatch):
    monkeypatch.setitem(shared_decoding.MIN_SAVED_STEPS, "cpu", 30)
    request = SignalRequest(
        draft_tokens=16, layers=(0, 2), after_draft=True, samples=samples, sample_tokens=16, seed=1,
        sampling=sampling, resumable=False,
    )  # fmt: skip
    replayed = like(model, stop_ids=stop).read(PROMPTS, request)
    n_replays = [graph.n_replays for graph in graphs]
    assert all(n_replays) if stop else n_replays == [15]  # 16 tokens are fed, the first of them to load the kernels
    monkeypatch.setattr(cuda_graph, "GRAPH_DEVICES", set())
    assert_alike(replayed, like(model, stop_ids=stop).read(PROMPTS, request))


@pytest.mark.parametrize(
    ("message", "devices"), [("operation not permitted when stream is capturing", set()), ("out of memory", {"cpu"})]
)
def test_a_failed_capture_changes_no_answer(model, graphs, message, devices, monkeypatch, caplog):
    attempts = []

    def fail(function, device):
        attempts.append(1)
        raise RuntimeError(message)

    request = SignalRequest(draft_tokens=12, samples=2, sample_tokens=12, seed=1, resumable=False)
    replayed = like(model, stop_ids=frozenset()).read(PROMPTS, request)
    assert len(graphs) == 1
    monkeypatch.setattr(cuda_graph, "capture_graph", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cuda_graph._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert_alike(like(model, stop_ids=frozenset()).read(PROMPTS, request), replayed)
    assert [message in record.getMessage() for record in caplog.records] == [True]
    # After a lack of memory, it is tried again with an empty cache, and again for the next batch.
    assert (len(attempts), cuda_graph.GRAPH_DEVICES) == (1 + len(devices), devices)


def test_only_the_second_of_enough_calls_is_captured(graphs):
    calls, step, short = [], GraphedStep(CPU), GraphedStep(CPU)
    for n_left in range(8, 0, -1):
        step.run(lambda: calls.append(1) or torch.zeros(1), n_left)
    assert (len(calls), len(graphs), graphs[0].n_replays) == (2, 1, 7)
    for n_left in range(cuda_graph.MIN_REPLAYS, 0, -1):
        short.run(lambda: torch.zeros(1), n_left)
    assert len(graphs) == 1


def test_a_capture_that_succeeds_with_more_memory_says_nothing(graphs, monkeypatch, caplog):
    capture, attempts = cuda_graph.capture_graph, []

    def fail_once(function, device):
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("out of memory")
        return capture(function, device)

    monkeypatch.setattr(cuda_graph, "capture_graph", fail_once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cuda_graph._warn.cache_clear()
    step = GraphedStep(CPU)
    with caplog.at_level(logging.WARNING):
        for n_left in range(8, 0, -1):
            step.run(lambda: torch.zeros(1), n_left)
    assert (len(attempts), len(graphs), caplog.records) == (2, 1, [])
