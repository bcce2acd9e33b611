"""The threads of a model serve several clients in turn."""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from knowgate.core.stop_flag import check_stop_flag
from knowgate.models import fair_executor
from knowgate.models.backend import Backend, allow_interruption
from knowgate.models.fair_executor import CLIENT, FairExecutor


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


def test_a_canceled_call_that_waits_keeps_no_memory(busy):
    executor, release = busy

    class Body(bytearray):
        """A large request."""

    body = Body(10)
    reference = weakref.ref(body)
    call = submit(executor, "a", len, body)
    following = submit(executor, "a", int, "7")
    del body
    assert reference() is not None
    call.cancel()
    assert reference() is None
    release.set()
    assert following.result(30) == 7


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
    """A model that takes a second for each step, and checks its stop flag after it."""

    is_interruptible = True

    def __init__(self, order, clock):
        self.order, self.clock = order, clock

    def generate(self, name, steps):
        for _ in range(steps):
            self.order.append(name)
            self.clock.append(1)
            check_stop_flag()


@pytest.fixture
def run(busy, monkeypatch):
    """A function that runs calls of clients, given as (client, number of steps), and returns the order of steps."""
    executor, release = busy
    order, clock = [], []
    monkeypatch.setattr(fair_executor, "time", SimpleNamespace(monotonic=lambda: sum(clock)))
    model = InterruptibleModel(order, clock)

    def run(*calls, is_allowed=True):
        def work(name, steps):
            with allow_interruption(model if is_allowed else None):
                model.generate(name, steps)
            return name

        running = [submit(executor, name, work, name, steps) for name, steps in calls]
        release.set()
        assert [call.result(30) for call in running] == [name for name, _ in calls]
        return "".join(order)

    return run


def test_a_short_call_does_not_wait_for_a_long_one(run):
    assert run(("a", 8), ("b", 1)) == "abaaaaaaa"


def test_a_long_call_that_comes_later_does_not_delay_a_short_one(run):
    assert run(("a", 3), ("b", 8)) == "abbaa" + "bbbbbb"


def test_calls_of_one_client_do_not_interrupt_each_other(run):
    assert run(("a", 3), ("b", 2), ("b", 2)) == "abba" + "abb"


def test_a_call_is_interrupted_only_where_it_allows_it(run):
    assert run(("a", 3), ("b", 1), is_allowed=False) == "aaab"


@pytest.mark.parametrize(("credit", "order"), [(1, "aaaaba"), (3, "aaaabbba")])
def test_short_calls_one_after_the_other_do_not_each_wait_for_a_long_one(busy, monkeypatch, credit, order):
    monkeypatch.setattr(fair_executor, "CREDIT_SECONDS", credit)
    monkeypatch.setattr(fair_executor, "LINGER_SECONDS", 1)
    executor, release = busy
    steps, clock, calls = [], [], []
    monkeypatch.setattr(fair_executor, "time", SimpleNamespace(monotonic=lambda: sum(clock)))
    model = InterruptibleModel(steps, clock)

    def run_short():
        with allow_interruption(model):
            model.generate("b", 1)

    def submit_short():
        if len(calls) < 6:
            calls.append(submit(executor, "b", run_short))
            calls[-1].add_done_callback(lambda _: threading.Timer(0.02, submit_short).start())

    def run_long():
        with allow_interruption(model):
            model.generate("a", 4)
            submit_short()
            check_stop_flag()
            model.generate("a", 4)

    long_call = submit(executor, "a", run_long)
    release.set()
    long_call.result(30)
    while len(calls) < 6 or not calls[-1].done():
        time.sleep(0.001)
    assert "".join(steps).startswith(order)


@pytest.mark.parametrize(("most", "order"), [(4, "abcab"), (1, "abbac")])
def test_only_some_calls_pause_at_once(run, monkeypatch, most, order):
    monkeypatch.setattr(fair_executor, "MAX_PAUSED_CALLS", most)
    assert run(("a", 2), ("b", 2), ("c", 1)) == order


def test_many_calls_of_many_clients_all_end():
    executor, model = FairExecutor(2), InterruptibleModel([], [])

    def work(number):
        with allow_interruption(model):
            for _ in range(5):
                time.sleep(0.0005)
                check_stop_flag()
        return number

    calls = [submit(executor, f"client {number % 7}", work, number) for number in range(200)]
    assert [call.result(60) for call in calls] == list(range(200))
    executor.shutdown()


def test_paused_and_waiting_calls_end_before_a_shutdown(busy):
    executor, release = busy
    model, started = InterruptibleModel([], []), threading.Event()

    def work():
        with allow_interruption(model):
            started.set()
            for _ in range(20):
                time.sleep(0.02)
                check_stop_flag()
        return "done"

    calls = [submit(executor, name, work) for name in "abc"]
    release.set()
    assert started.wait(30)
    executor.shutdown()
    assert [call.result(0) for call in calls] == ["done"] * 3
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(work)


def test_an_error_in_a_call_does_not_reach_the_call_that_it_interrupts(busy):
    executor, release = busy
    model = InterruptibleModel([], [])

    def work():
        with allow_interruption(model):
            model.generate("a", 3)
        return "done"

    outer, failing = submit(executor, "a", work), submit(executor, "b", int, "x")
    release.set()
    assert outer.result(30) == "done"
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(30)
