"""Batch sizes of the local runner."""

import pytest

from knowgate.labels.local_runner import LocalRunner


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
