"""A GPU that is full or has failed, without one: memory that is said to be free, and a model whose passes raise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import DeviceError, OutOfMemory
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelPlan
from knowgate.labels.run import run_labeling
from knowgate.models.hf.batching import (
    CUDA_LIMITS,
    MAX_FREE_SHARE,
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
def card(monkeypatch):
    """A card with so many free bytes; the shares of it that were allowed, in order."""

    def make(free, reserved=0, allocated=0, total=139 * GIB):
        allowed = []

        def told(number):
            assert number == 0, "PyTorch wants the number of a card here, not a device without one"
            return 1.0

        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, total))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: reserved)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: allocated)
        monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", told, raising=False)
        monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, device: allowed.append(share))
        return allowed

    return make


def test_the_bytes_of_a_token_are_those_of_its_keys_and_values():
    need = estimate_memory_cost(model_of(**QWEN))
    assert need.row_token == 2 * 28_672
    assert need.row == 16 * 151_936 + 64 * 28_672  # logits, and an answer of 64 tokens


def test_a_large_card_is_planned_for_a_quarter_of_what_is_free(card):
    card(free=136 * GIB)
    limits, need = compute_batch_limits(model_of(**QWEN), GPU), estimate_memory_cost(model_of(**QWEN))
    planned = PLANNED_SHARE * 136 * GIB
    assert limits.row_tokens * need.row_token <= planned
    assert limits.rows * need.row <= planned
    assert limits.prompt_tokens * need.prompt_token <= planned
    assert limits.prompts == CUDA_LIMITS.prompts


def test_batches_shrink_with_what_others_leave_free(card):
    card(free=2 * GIB)
    few = compute_batch_limits(model_of(**QWEN), GPU)
    assert few.row_tokens == int(PLANNED_SHARE * 2 * GIB / 57_344)
    card(free=0)
    assert compute_batch_limits(model_of(**QWEN), GPU).rows == 1


def test_what_the_allocator_keeps_unused_counts_as_free(card):
    card(free=10 * GIB, reserved=8 * GIB, allocated=3 * GIB)
    assert compute_batch_limits(model_of(**QWEN), GPU).row_tokens == int(PLANNED_SHARE * 15 * GIB / 57_344)


def test_during_a_pass_no_more_than_a_share_of_the_free_memory_may_be_taken(card):
    allowed = card(free=100 * GIB, reserved=20 * GIB, allocated=10 * GIB, total=200 * GIB)
    with limit_gpu_memory(GPU):
        assert allowed == [pytest.approx((10 + MAX_FREE_SHARE * 110) / 200)]
    assert allowed[1:] == [1.0]


def test_the_share_does_not_creep_up_from_pass_to_pass():
    assert GpuMemory(free=110 * GIB, used=10 * GIB, total=200 * GIB).most < 0.4


def test_no_pass_takes_more_than_four_fifths_of_the_card():
    assert GpuMemory(free=130 * GIB, used=60 * GIB, total=200 * GIB).most == pytest.approx(
        (60 + MAX_FREE_SHARE * 130) / 200
    )
    assert GpuMemory(free=90 * GIB, used=110 * GIB, total=200 * GIB).most == 0.8
    assert GpuMemory(free=20 * GIB, used=180 * GIB, total=200 * GIB).most == 0.9  # weights that are there stay there


def test_answers_that_share_their_prompts_need_no_room_for_copies(card):
    card(free=2 * GIB)
    assert compute_batch_limits(model_of(**QWEN), GPU, shared=True).row_tokens is None
    assert list(split_into_batches([900] * 4, replace(CUDA_LIMITS, row_tokens=None), rows=2_000)) == [[0, 1, 2, 3]]
    assert len(list(split_into_batches([900] * 4, replace(CUDA_LIMITS, row_tokens=1_000_000), rows=2_000))) == 4


def test_on_a_cpu_nothing_is_asked():
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
def test_errors_of_too_little_memory_are_told_from_others(error):
    assert is_memory_error(error)
    assert not is_memory_error(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_memory_error(STICKY)


def limited(most, error):
    """Work that fails on more than `most` prompts at once."""

    def work(places):
        if len(places) > most:
            raise error
        return [place * 10 for place in places]

    return work


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), CUDNN])
def test_a_batch_is_halved_until_it_fits(error):
    assert run_in_batches([[1]] * 7, CUDA_LIMITS, limited(2, error)) == [0, 10, 20, 30, 40, 50, 60]


def test_a_single_question_that_does_not_fit_is_a_sentence():
    with pytest.raises(OutOfMemory, match=r"single question: end other programs that use the GPU, .* same command"):
        run_in_batches([[1]] * 3, CUDA_LIMITS, limited(0, CUDNN))


def test_a_gpu_that_failed_is_a_sentence_and_nothing_is_tried_again():
    tried = []

    def work(places):
        tried.append(places)
        raise STICKY

    with pytest.raises(DeviceError, match=r"the GPU failed .*\(CUDA error: device-side assert triggered\)"):
        run_in_batches([[1]] * 4, CUDA_LIMITS, work)
    assert len(tried) == 1


def test_an_error_that_is_not_the_gpus_goes_through():
    def work():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_single(work)


# --- a model whose passes raise -------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_byte_llama(tmp_path_factory.mktemp("llama"))


def failing(folder, error, *, above=0, after=0):
    """A model whose passes of more than `above` rows raise, once `after` passes were made."""
    model, passes = HFModel(str(folder)), []

    def refuse(module, arguments, keywords):
        passes.append(1)
        if len(keywords["input_ids"]) > above and len(passes) > after:
            raise error

    model.loaded.model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def test_readings_under_memory_pressure_are_those_in_peace(llama):
    prompts = [Prompt(f"what is {i}?") for i in range(6)]
    want = SignalRequest(draft_tokens=4, samples=2, sample_tokens=4, seed=0)
    calm, pressed = HFModel(str(llama)).read(prompts, want), failing(llama, CUDNN, above=4).read(prompts, want)
    assert [(r.draft.text, [s.text for s in r.samples]) for r in pressed] == [
        (r.draft.text, [s.text for s in r.samples]) for r in calm
    ]


def test_a_gpu_that_fails_in_the_middle_of_a_run_leaves_the_finished_rows_and_the_run_goes_on(llama, tmp_path):
    plan, grader, folder = (
        LabelPlan(samples=1, max_tokens=3, open_book=False),
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


def test_a_gpu_that_others_have_filled_ends_the_run_instead_of_failing_every_row(llama, tmp_path):
    plan, folder = LabelPlan(samples=1, max_tokens=3, open_book=False), RunFolder(tmp_path / "run")
    with pytest.raises(OutOfMemory):
        run_labeling(folder, QUESTIONS, Labeler(failing(llama, CUDNN), StringGrader(), plan), data="d")
    assert list(folder.rows()) == []
