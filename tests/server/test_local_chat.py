"""A model in the server's process stops when nobody waits for its answer."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from knowgate.core.stop_flag import StopError, check_stop_flag
from knowgate.models.fake import FakeModel
from tests.server.conftest import KNOWN
from tests.support.processes import until

LONG = "Write a long story."
CASES = [{"batch": 16}, {"batch": 1}]


class SlowGeneration:
    """Generates the answer to LONG in `seconds`, token by token, and counts what was started and what was stopped."""

    seconds = 20.0

    def __init__(self, generate):
        self.generate = generate
        self.n_started = self.n_stopped = 0

    def __call__(self, model, prompts, **settings):
        if any(LONG in prompt.text for prompt in prompts):
            self.n_started += 1
            end = time.monotonic() + self.seconds
            try:
                while time.monotonic() < end:
                    check_stop_flag()
                    time.sleep(0.01)
            except StopError:
                self.n_stopped += 1
                raise
        return self.generate(model, prompts, **settings)


@pytest.fixture
def slow(monkeypatch):
    slow = SlowGeneration(FakeModel.generate)
    monkeypatch.setattr(FakeModel, "generate", lambda model, prompts, **settings: slow(model, prompts, **settings))
    return slow


def post(address, text, timeout=30, **fields):
    body = {"model": "knowgate", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=timeout)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", CASES)
def test_after_a_504_the_model_is_free(serve, slow, options, streamed):
    address, _ = serve(upstream=False, gate="never", options={"deadline": 2.0, **options})
    reply = post(address, LONG, stream=streamed)
    assert reply.status_code == 504
    assert post(address, KNOWN).status_code == 200  # within the deadline of 2 s
    assert (slow.n_started, slow.n_stopped) == (1, 1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", CASES)
def test_after_a_client_has_disconnected_the_model_is_free(serve, slow, options, streamed):
    address, app = serve(upstream=False, gate="never", options={"deadline": 10.0, **options})
    with pytest.raises(httpx.TimeoutException):
        post(address, LONG, timeout=0.5, stream=streamed)
    assert post(address, KNOWN, timeout=5).status_code == 200
    assert (slow.n_started, slow.n_stopped) == (1, 1)
    until(lambda: app.state.service.active_requests.count == 0)


@pytest.mark.parametrize("options", CASES)
def test_canceled_requests_that_wait_for_the_model_do_not_start(serve, slow, options):
    address, _ = serve(upstream=False, gate="never", options={"deadline": 3.0, **options})

    def leave(number):
        with pytest.raises(httpx.TimeoutException):
            post(address, LONG, timeout=0.5, max_tokens=100 + number)  # each has a batch of its own

    with ThreadPoolExecutor(6) as threads:
        running = threads.submit(post, address, LONG)
        until(lambda: slow.n_started == 1)
        list(threads.map(leave, range(5)))
        assert running.result().status_code == 504
    assert post(address, KNOWN).status_code == 200
    assert (slow.n_started, slow.n_stopped) == (1, 1)


def test_a_batch_goes_on_while_somebody_waits_for_one_of_its_answers(serve, slow):
    address, app = serve(upstream=False, gate="never")
    app.state.service.local_chat._batcher.wait_seconds = 0.3  # both requests share a batch
    slow.seconds = 2.0
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(post, address, LONG)
        with pytest.raises(httpx.TimeoutException):
            post(address, LONG, timeout=1.0)
        assert patient.result().status_code == 200
    assert (slow.n_started, slow.n_stopped) == (1, 0)
