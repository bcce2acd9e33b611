"""Batch sizes and GPU errors, on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import DeviceError, OutOfMemory
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import run_labeling
from knowgate.models.hf.batching import (
    CUDA_LIMITS,
    MAX_SHARE_OF_AVAILABLE,
    PLANNED_SHARE,
    GpuMemory,
    compute_batch_limits,
    estimate_memory_cost,
    is_memory_error,
    limit_gpu_memory,
    run_in_batches,
    run_single,
    split_into_batches,
)
from knowgate.models.hf.model import HFModel
from knowgate.types import Prompt, Question, SignalRequest
from tests.support.byte_llama import save_byte_llama

GPU = torch.device("cuda")
GIB = 1 << 30
QWEN = {  # 1.5B: keys and values of a token take 28,672 bytes
    "num_hidden_layers": 28, "num_key_value_heads": 2, "num_attention_heads": 12, "head_dim": 128,
    "hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151_936,
}  # fmt: skip
CUDNN = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: CUDNN_STATUS_NOT_SUPPORTED: no plan")
STICKY = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")
QUESTIONS = [Question(f"q{i}", f"what is {i}?", answers=("x",)) for i in range(8)]


def model_of(**sizes):
    config = SimpleNamespace(**sizes)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config), dtype=torch.bfloat16)


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with the given memory; returns the list of memory fractions that PyTorch was limited to."""

    def make(free, reserved=0, allocated=0, total=139 * GIB):
        allowed = []

        def get_fraction(number):
            assert number == 0, "PyTorch needs the number of a GPU here"
            return 1.0

        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, total))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: reserved)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: allocated)
        monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", get_fraction, raising=False)
        monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, device: allowed.append(share))
        return allowed

    return make


def test_memory_cost_counts_keys_values_and_logits():
    cost = estimate_memory_cost(model_of(**QWEN))
    assert cost.per_cached_token == 2 * 28_672
    assert cost.per_answer == 16 * 151_936 + 64 * 28_672  # logits, and an answer of 64 tokens


def test_batches_are_planned_for_a_quarter_of_the_free_memory(gpu):
    gpu(free=136 * GIB)
    limits, cost = compute_batch_limits(model_of(**QWEN), GPU), estimate_memory_cost(model_of(**QWEN))
    planned = PLANNED_SHARE * 136 * GIB
    assert limits.copied_tokens * cost.per_cached_token <= planned
    assert limits.answers * cost.per_answer <= planned
    assert limits.prompt_tokens * cost.per_prompt_token <= planned
    assert limits.prompt_tokens < limits.cached_tokens <= planned / cost.per_cached_token
    assert limits.prompts == CUDA_LIMITS.prompts


def test_batches_shrink_with_the_free_memory(gpu):
    gpu(free=2 * GIB)
    few = compute_batch_limits(model_of(**QWEN), GPU)
    assert few.copied_tokens == int(PLANNED_SHARE * 2 * GIB / 57_344)
    gpu(free=0)
    assert compute_batch_limits(model_of(**QWEN), GPU).answers == 1


def test_memory_cached_by_the_allocator_counts_as_free(gpu):
    gpu(free=10 * GIB, reserved=8 * GIB, allocated=3 * GIB)
    assert compute_batch_limits(model_of(**QWEN), GPU).copied_tokens == int(PLANNED_SHARE * 15 * GIB / 57_344)


def test_a_pass_is_limited_to_a_share_of_the_free_memory(gpu):
    allowed = gpu(free=100 * GIB, reserved=20 * GIB, allocated=10 * GIB, total=200 * GIB)
    with limit_gpu_memory(GPU):
        assert allowed == [pytest.approx((10 + MAX_SHARE_OF_AVAILABLE * 110) / 200)]
    assert allowed[1:] == [1.0]


def test_the_limit_does_not_grow_from_pass_to_pass():
    assert GpuMemory(available=110 * GIB, used_here=10 * GIB, total=200 * GIB).max_share < 0.4


def test_no_pass_takes_more_than_four_fifths_of_the_gpu():
    assert GpuMemory(available=130 * GIB, used_here=60 * GIB, total=200 * GIB).max_share == pytest.approx(
        (60 + MAX_SHARE_OF_AVAILABLE * 130) / 200
    )
    assert GpuMemory(available=90 * GIB, used_here=110 * GIB, total=200 * GIB).max_share == 0.8
    assert (
        GpuMemory(available=20 * GIB, used_here=180 * GIB, total=200 * GIB).max_share == 0.9
    )  # weights already loaded stay loaded


def test_answers_with_a_shared_prompt_cache_need_no_memory_for_copies(gpu):
    gpu(free=2 * GIB)
    assert compute_batch_limits(model_of(**QWEN), GPU, shared=True).copied_tokens is None
    assert list(split_into_batches([900] * 4, replace(CUDA_LIMITS, copied_tokens=None), rows=2_000)) == [[0, 1, 2, 3]]
    assert len(list(split_into_batches([900] * 4, replace(CUDA_LIMITS, copied_tokens=1_000_000), rows=2_000))) == 4


@pytest.mark.parametrize(
    "limit",
    [{"prompts": 2}, {"prompt_tokens": 29}, {"answers": 7}, {"copied_tokens": 89}],
    ids=lambda limit: next(iter(limit)),
)
def test_a_batch_keeps_each_limit(limit):
    # With three prompts of 10 tokens and 3 answers each, a batch would have 30 tokens, 9 rows and 90 tokens of all rows.
    assert list(split_into_batches([10] * 3, CUDA_LIMITS, rows=3)) == [[0, 1, 2]]
    assert list(split_into_batches([10] * 3, replace(CUDA_LIMITS, **limit), rows=3)) == [[0, 1], [2]]


def test_cpu_limits_are_fixed():
    with limit_gpu_memory(torch.device("cpu")):
        assert compute_batch_limits(None, torch.device("cpu")).prompts == 64


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        CUDNN,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_memory_errors_are_recognized(error):
    assert is_memory_error(error)
    assert not is_memory_error(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_memory_error(STICKY)


def failing_above(size, error):
    """Return work that fails on more than `size` prompts at once."""

    def work(indices):
        if len(indices) > size:
            raise error
        return [index * 10 for index in indices]

    return work


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), CUDNN])
def test_a_batch_is_halved_until_it_fits(error):
    assert run_in_batches([[1]] * 7, CUDA_LIMITS, failing_above(2, error)) == [0, 10, 20, 30, 40, 50, 60]


def test_a_single_question_that_does_not_fit_is_explained():
    with pytest.raises(OutOfMemory, match=r"single question. Use a smaller model .* same command"):
        run_in_batches([[1]] * 3, CUDA_LIMITS, failing_above(0, CUDNN))


def test_a_failed_gpu_is_explained_and_not_tried_again():
    tried = []

    def work(indices):
        tried.append(indices)
        raise STICKY

    with pytest.raises(DeviceError, match=r"the GPU failed .*\(CUDA error: device-side assert triggered\)"):
        run_in_batches([[1]] * 4, CUDA_LIMITS, work)
    assert len(tried) == 1


def test_other_errors_pass_unchanged():
    def work():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_single(work)


# --- a model that fails during a pass -------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_byte_llama(tmp_path_factory.mktemp("llama"))


def failing(folder, error, *, above=0, after=0):
    """Return a model that raises on passes of more than `above` rows, after `after` passes."""
    model, passes = HFModel(str(folder)), []

    def refuse(module, arguments, keywords):
        passes.append(1)
        if len(keywords["input_ids"]) > above and len(passes) > after:
            raise error

    model.loaded.model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def test_halved_batches_give_the_same_readings(llama):
    prompts = [Prompt(f"what is {i}?") for i in range(6)]
    want = SignalRequest(draft_tokens=4, samples=2, sample_tokens=4, seed=0)
    expected, readings = HFModel(str(llama)).read(prompts, want), failing(llama, CUDNN, above=4).read(prompts, want)
    assert [(r.draft.text, [s.text for s in r.samples]) for r in readings] == [
        (r.draft.text, [s.text for s in r.samples]) for r in expected
    ]


def test_a_run_can_be_resumed_after_the_gpu_failed(llama, tmp_path):
    plan, grader, folder = (
        LabelOptions(samples=1, max_tokens=3, closed_book=True, layers="none"),
        StringGrader(),
        RunFolder(tmp_path / "run"),
    )
    with pytest.raises(DeviceError):
        run_labeling(folder, QUESTIONS, Labeler(failing(llama, STICKY, after=5), grader, plan), data="d")
    finished = [row.id for row in folder.rows()]
    assert 0 < len(finished) < len(QUESTIONS)
    assert all(row.error is None for row in folder.rows())
    run_labeling(folder, QUESTIONS, Labeler(HFModel(str(llama)), grader, plan), data="d")
    assert [(row.id, row.error) for row in folder.rows()] == [(question.id, None) for question in QUESTIONS]


def test_a_full_gpu_ends_the_run_instead_of_failing_every_row(llama, tmp_path):
    plan, folder = LabelOptions(samples=1, max_tokens=3, closed_book=True, layers="none"), RunFolder(tmp_path / "run")
    with pytest.raises(OutOfMemory):
        run_labeling(folder, QUESTIONS, Labeler(failing(llama, CUDNN), StringGrader(), plan), data="d")
    assert list(folder.rows()) == []
