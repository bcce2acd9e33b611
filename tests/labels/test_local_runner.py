"""Batch sizes of the local runner."""

import pytest
import torch

from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.run import choose_local_runner
from knowgate.models.fake import FakeModel
from knowgate.models.hf.loader import LoadedModel
from knowgate.models.hf.model import HFModel


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        (1.0, [4, 16, 64, 100, 16]),  # under a quarter of ten seconds: four times as many, up to the largest
        (5.0, [4, 8, 16, 32, 64, 76]),  # under ten: twice as many
        (20.0, [4] * 50),  # longer: no more
    ],
)
def test_batches_grow_until_they_take_ten_seconds(monkeypatch, seconds, sizes):
    times = iter(value for tick in range(10**6) for value in (tick * seconds, (tick + 1) * seconds))
    monkeypatch.setattr("knowgate.labels.local_runner.time.perf_counter", lambda: next(times))
    taken = list(LocalRunner(largest=100).run(list(range(200)), len))
    assert taken == sizes


def test_a_model_can_name_the_size_of_the_first_batch():
    fake = FakeModel()
    assert choose_local_runner(fake).first == 4
    fake.first_batch_size = 512
    assert choose_local_runner(fake).first == 512


def test_a_gpu_starts_with_many_questions():
    model = HFModel("somewhere")
    for device, size in (("cpu", 4), ("cuda", 512)):
        vars(model)["loaded"] = LoadedModel(None, None, torch.device(device))
        assert choose_local_runner(model).first == size
