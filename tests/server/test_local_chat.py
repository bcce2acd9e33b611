"""A model in the server's process stops when nobody waits for its answer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from knowgate.core.stop_flag import StopError, check_stop_flag
from knowgate.errors import BadInput, ModelError
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.rules.topic_rule import RuleMatch
from knowgate.models.fair_executor import get_running_call
from knowgate.models.fake import FakeModel
from knowgate.models.openai.client import StatusError
from knowgate.server.auth.api_keys import add_key
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask as chat
from tests.support.processes import PATIENCE, until

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


@pytest.mark.parametrize("durable", [False, True])
def test_a_stream_is_recorded_like_a_whole_answer(serve, tmp_path, durable):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "durable": durable}
    address, app = serve(upstream=False, gate="logprob:first", threshold=0.0, arbiter="rules", options=options)
    snapshot = app.state.service.snapshot
    results = []
    for stream in (False, True):
        snapshot.totals[""] = type(snapshot.totals[""])()
        id = chat(address, UNKNOWN, model="knowgate", stream=stream).headers["x-knowgate-id"]
        stored = httpx.get(f"{address}/v1/decisions/{id}").json()
        shown = httpx.get(f"{address}/v1/dashboard").json()["recent"][0]
        stages = stored.pop("milliseconds")
        assert stages == shown.pop("milliseconds")
        assert sum(stages.values()) <= 2.1 * stages["total"]  # the stages and the total
        metrics = httpx.get(f"{address}/metrics").text.splitlines()
        n_stages = {line.split()[-1] for line in metrics if line.startswith("knowgate_stage_duration_seconds_count")}
        assert n_stages == {f"{len(results) + 1:.1f}"}  # all stages are counted, once for each request
        counts = {name: value for name, value in vars(snapshot.totals[""]).items() if not name.endswith("_seconds")}
        same = ("retrieve", "notes", "passages", "choice", "degraded", "status", "model", "question", "follow_up")
        results.append((sorted(stages), counts, [[row[name] for name in same] for row in (stored, shown)]))
    assert results[0] == results[1]


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


def test_decisions_read_the_llm_in_its_own_thread_where_keys_take_turns(serve, monkeypatch):
    read, threads = FakeModel.read, []
    monkeypatch.setattr(FakeModel, "read", lambda *args: threads.append(threading.current_thread().name) or read(*args))
    address, _ = serve(upstream=False, gate="logprob:mean")
    reply = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}, timeout=30)
    assert (reply.status_code, reply.json()["retrieve"]) == (200, True)
    assert [name.startswith("knowgate-model") for name in threads] == [True]


def test_a_decision_of_an_llm_that_fails_is_to_retrieve(serve, monkeypatch):
    monkeypatch.setattr(FakeModel, "read", lambda *args: 1 / 0)
    address, _ = serve(upstream=False, gate="logprob:mean")
    reply = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}, timeout=30)
    assert (reply.status_code, reply.json()["retrieve"], reply.json()["degraded"]) == (200, True, ["gate"])


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


N_MANY = 6


@pytest.mark.parametrize("options", [{"batch": 2}, {"batch": 1}])
@pytest.mark.parametrize("differ", [True, False], ids=["several pipelines", "one pipeline"])
def test_a_key_with_many_requests_does_not_delay_another_key(serve, tmp_path, monkeypatch, options, differ):
    generate, started, release, order = FakeModel.generate, threading.Event(), threading.Event(), []

    def wait_and_generate(model, prompts, **settings):
        started.set()
        release.wait(60)
        time.sleep(0.1)  # meanwhile, the event loop can queue the next step of a request whose turn it was
        order.extend("carol" for prompt in prompts if "Carol" in prompt.text)
        order.extend("alice" for prompt in prompts if "Alice" in prompt.text)
        return generate(model, prompts, **settings)

    monkeypatch.setattr(FakeModel, "generate", wait_and_generate)
    headers = {name: {"Authorization": f"Bearer {add_key(tmp_path / 'k.json', name)}"} for name in ("alice", "carol")}
    address, app = serve(upstream=False, gate="never", options={"keys": str(tmp_path / "k.json"), **options})

    def send(name, number):
        body = {"model": "knowgate", "max_tokens": 8 + number * differ}
        body["messages"] = [{"role": "user", "content": f"Who is {name.title()} {number}?"}]
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers[name], timeout=60).status_code

    def count_waiting():
        n_calls = len(list(app.state.service.gate_service.rag.model.workers._waiting))
        return n_calls + sum(map(len, app.state.service.local_chat._batcher._queues.values()))

    with ThreadPoolExecutor(N_MANY + 2) as pool:
        replies = [pool.submit(send, "alice", 0)]
        assert started.wait(30)
        replies += [pool.submit(send, "alice", number) for number in range(1, N_MANY)]
        until(lambda: app.state.service.active_requests.count == N_MANY and count_waiting() == N_MANY - 1)
        replies.append(pool.submit(send, "carol", 0))
        until(lambda: count_waiting() == N_MANY)
        httpx.get(f"{address}/health")  # the event loop has passed all requests on by now
        release.set()
        assert {reply.result() for reply in replies} == {200}
    assert order.index("carol") <= 2  # after the request that ran, and at most one that shares its batch


def test_questions_to_an_llm_server_do_not_wait_for_each_other(serve, stub):
    address, _ = serve(upstream=False, model=f"openai:stub-llm@{stub.url}", gate="never")
    stub.waits_for = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(chat, address, "Who wrote Emma?", model="knowgate")
        until(lambda: len(stub.bodies) == 1)
        second = threads.submit(chat, address, "Who wrote Persuasion?", model="knowgate")
        until(lambda: len(stub.bodies) == 2)
        stub.waits_for.set()
        assert [first.result().status_code, second.result().status_code] == [200, 200]


def test_many_questions_at_once_to_an_llm_server_do_not_block_each_other(serve, stub):
    address, _ = serve(upstream=False, model=f"openai:stub-llm@{stub.url}", gate="never")
    stub.slow = 0.1
    with ThreadPoolExecutor(24) as threads:
        replies = threads.map(lambda number: chat(address, f"Who wrote book {number}?", model="knowgate"), range(24))
        assert {reply.status_code for reply in replies} == {200}  # within the client's five seconds


FOLLOW_UP = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "There was a queen."},
    {"role": "user", "content": "When did she die?"},
]


@pytest.mark.parametrize("path", ["chat/completions", "decide"])
def test_after_the_deadline_a_follow_up_is_no_longer_rewritten(serve, slow, path):
    address, _ = serve(upstream=False, gate="never", options={"deadline": 2.0})
    body = {"model": "knowgate", "messages": FOLLOW_UP}
    assert httpx.post(f"{address}/v1/{path}", json=body, timeout=30).status_code == 504
    assert post(address, KNOWN).status_code == 200
    assert (slow.n_started, slow.n_stopped) == (1, 1)


@pytest.mark.parametrize("path", ["chat/completions", "decide"])
@pytest.mark.parametrize("error", [BadInput("the prompt exceeds the context window"), ModelError("no answer")])
def test_a_follow_up_that_the_llm_cannot_rewrite_is_answered(serve, monkeypatch, path, error):
    generate = FakeModel.generate

    def fail(model, prompts, **settings):
        if any("Last question" in prompt.text for prompt in prompts):
            raise error
        return generate(model, prompts, **settings)

    monkeypatch.setattr(FakeModel, "generate", fail)
    address, _ = serve(upstream=False, gate="never")
    body = {"model": "knowgate", "messages": FOLLOW_UP}
    assert httpx.post(f"{address}/v1/{path}", json=body, timeout=30).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "decide"])
def test_other_keys_interrupt_the_rewriting_of_a_follow_up(serve, slow, monkeypatch, tmp_path, path):
    monkeypatch.setattr(FakeModel, "is_interruptible", True)
    keys = [add_key(tmp_path / "keys.json", name) for name in ("alice", "bob")]
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in keys)
    address, _ = serve(upstream=False, gate="never", options={"keys": str(tmp_path / "keys.json")})
    slow.seconds = 5.0
    with ThreadPoolExecutor(1) as threads:
        body = {"model": "knowgate", "messages": FOLLOW_UP}
        long = threads.submit(httpx.post, f"{address}/v1/{path}", json=body, headers=alice, timeout=30)
        until(lambda: slow.n_started == 1)
        short = {"model": "knowgate", "messages": [{"role": "user", "content": KNOWN}]}
        reply = httpx.post(f"{address}/v1/chat/completions", json=short, headers=bob, timeout=30)
        assert (reply.status_code, long.done()) == (200, False)
        assert long.result().status_code == 200


def test_other_keys_use_the_llm_while_a_search_is_slow(serve, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeModel, "is_interruptible", True)
    keys = [add_key(tmp_path / "keys.json", name) for name in ("alice", "bob")]
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in keys)
    address, app = serve(upstream=False, gate="prompt", options={"keys": str(tmp_path / "keys.json")})
    has_started, may_end = threading.Event(), threading.Event()

    def search(queries, k):
        has_started.set()
        assert may_end.wait(PATIENCE)
        return [[] for _ in queries]

    monkeypatch.setattr(app.state.service.gate_service.rag.retriever.retriever, "search", search)

    def answer(text, headers):
        body = {"model": "knowgate", "messages": [{"role": "user", "content": text}]}
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)

    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(answer, UNKNOWN, alice)
        assert has_started.wait(PATIENCE)
        reply = answer(KNOWN, bob)
        assert (reply.status_code, long.done()) == (200, False)
        may_end.set()
        assert long.result().json()["knowgate"]["retrieve"]


def test_slow_rules_run_outside_the_thread_of_the_llm(serve, monkeypatch):
    class SlowTopics(RuleSet):
        is_fast = False

        def decide(self, question, shared_budget=None):
            executors.append(get_running_call().executor)
            if question == UNKNOWN:
                time.sleep(0.5)
            return RuleMatch("topic", "skip", "a test")

    executors = []

    def change(service):
        service.gate_service.rag = service.gate_service.rag.replace(rules=SlowTopics())
        service.gate_service.timeout = 0.2

    address, app = serve(upstream=False, gate="logprob:first", threshold=0.0, change=change)
    fast, slow = (post(address, text).json()["knowgate"] for text in (KNOWN, UNKNOWN))
    assert [slow["retrieve"], fast["retrieve"]] == [True, False]
    assert app.state.service.gate_service.rag.model.workers not in executors


def test_messages_of_the_llm_server_are_not_stored_or_logged(serve, monkeypatch, tmp_path, caplog):
    """Some servers quote the prompt in their errors."""

    def refuse(*args):
        raise StatusError("http://127.0.0.1:9/v1", 400, f"the prompt was rejected: {UNKNOWN}")

    monkeypatch.setattr(FakeModel, "read", refuse)
    monkeypatch.setattr(FakeModel, "stream", refuse)
    database = tmp_path / "d.db"
    address, _ = serve(upstream=False, gate="logprob:mean", options={"decisions": str(database)})
    reply = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}, timeout=30)
    assert "answered 400" in reply.json()["reason"]
    assert post(address, UNKNOWN).status_code == 500
    assert ("answered 400" in caplog.text, UNKNOWN in caplog.text + reply.text) == (True, False)
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("d.db*"))
    assert (b"answered 400" in stored, UNKNOWN.encode() in stored) == (True, False)


def test_a_question_whose_client_has_disconnected_does_not_wait_for_its_turn(serve, slow):
    slow.seconds = 5.0
    address, app = serve(upstream=False, gate="never", options={"batch": 16})
    queues = app.state.service.local_chat._batcher._queues
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, address, LONG)
        until(lambda: slow.n_started == 1)
        with pytest.raises(httpx.ReadTimeout):
            post(address, KNOWN, timeout=0.3)
        until(lambda: not any(queues.values()))
        assert slow.n_stopped == 0
        assert long.result().status_code == 200
