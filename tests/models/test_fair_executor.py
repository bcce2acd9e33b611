"""The threads of a model serve several clients in turn."""

import threading
from types import SimpleNamespace

import pytest

from knowgate.core.stop_flag import check_stop_flag
from knowgate.models import backend
from knowgate.models.backend import CLIENT, Backend, FairExecutor, allow_interruption


@pytest.fixture
def busy():
    """An executor with one thread, which is busy until the event is set: (executor, event)."""
    executor, release = FairExecutor(1), threading.Event()
    started = threading.Event()
    executor.submit(lambda: (started.set(), release.wait(60)))
    assert started.wait(30)
    yield executor, release
    release.set()
    executor.shutdown()


def submit(executor, client, work, *args):
    token = CLIENT.set(client)
    try:
        return executor.submit(work, *args)
    finally:
        CLIENT.reset(token)


def test_clients_take_turns_and_each_is_served_in_order(busy):
    executor, release = busy
    order = []
    calls = [submit(executor, name[0], order.append, name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    release.set()
    for call in calls:
        call.result(30)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_error_reaches_the_caller_and_the_next_call_runs(busy):
    executor, release = busy
    failing, fine = submit(executor, "a", int, "x"), submit(executor, "a", int, "7")
    release.set()
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(30)
    assert fine.result(30) == 7


def test_a_shutdown_can_cancel_calls_that_wait(busy):
    executor, release = busy
    call = submit(executor, "a", int, "7")
    executor.shutdown(wait=False, cancel_futures=True)
    release.set()
    assert call.cancelled()


def test_a_client_that_is_being_served_comes_after_one_that_arrives_meanwhile():
    executor, started, release, order = FairExecutor(1), threading.Event(), threading.Event(), []
    first = submit(executor, "a", lambda: (started.set(), release.wait(60)))
    assert started.wait(30)
    calls = [submit(executor, name[0], order.append, name) for name in ("a2", "a3", "b1")]
    release.set()
    for call in (first, *calls):
        call.result(30)
    executor.shutdown()
    assert order == ["b1", "a2", "a3"]


class InterruptibleModel(Backend):
    """A model that checks its stop flag after each step, and records its steps."""

    def __init__(self, order, clock):
        self.order, self.clock = order, clock

    is_interruptible = True

    def generate(self, steps):
        for _ in range(steps):
            self.order.append("a")
            self.clock.append(1)
            check_stop_flag()


@pytest.fixture
def interrupted(busy, monkeypatch):
    """Two calls of b wait when a call of a begins, on a model that takes a second per step: (order, calls)."""
    executor, release = busy
    order, clock = [], []
    monkeypatch.setattr(backend, "time", SimpleNamespace(monotonic=lambda: sum(clock)))
    model = InterruptibleModel(order, clock)

    def run(steps, *, is_allowed):
        def work():
            with allow_interruption(model if is_allowed else None):
                model.generate(steps)

        def answer(name):
            order.append(name)
            clock.append(3)
            check_stop_flag()  # calls of the same client do not interrupt each other

        calls = [submit(executor, "a", work), *(submit(executor, "b", answer, name) for name in ("b1", "b2"))]
        release.set()
        for call in calls:
            call.result(30)
        return "".join(order)

    return run


def test_an_interrupted_call_runs_as_long_as_the_client_that_interrupted_it(interrupted):
    assert interrupted(8, is_allowed=True) == "ab1aaab2aaaa"


def test_a_call_is_interrupted_only_where_it_allows_it(interrupted):
    assert interrupted(3, is_allowed=False) == "aaab1b2"


def test_calls_of_several_clients_run_inside_each_other(busy):
    executor, release = busy
    model, order = InterruptibleModel([], []), []

    def work(name):
        with allow_interruption(model):
            check_stop_flag()
        order.append(name)

    calls = [submit(executor, name, work, name) for name in ("a", "b", "c")]
    release.set()
    for call in calls:
        call.result(30)
    assert order == ["c", "b", "a"]


def test_an_error_in_a_call_does_not_reach_the_call_that_it_interrupts(busy):
    executor, release = busy
    model = InterruptibleModel([], [])

    def work():
        with allow_interruption(model):
            model.generate(3)
        return "done"

    outer, failing = submit(executor, "a", work), submit(executor, "b", int, "x")
    release.set()
    assert outer.result(30) == "done"
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(30)
