"""The threads of a model serve several clients in turn."""

import threading

import pytest

from knowgate.models.backend import CLIENT, FairExecutor


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
