"""One client cannot exhaust the server: bodies, JSON values, patterns and searches have limits."""

import asyncio
import gc
import json
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from knowgate.core.validation import count_json_values
from knowgate.data.history.entries import is_too_long
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.models.fair_executor import CLIENT, FairExecutor
from knowgate.models.fake import FakeModel
from knowgate.server import json_api, load_limits, schemas
from knowgate.server.auth.api_keys import add_key
from knowgate.server.chat import decisions, request_formats
from knowgate.server.chat.gate_service import MAX_ABANDONED_SEARCHES
from knowgate.server.json_api import (
    LARGE_BODY_BYTES,
    MAX_FORWARDED_VALUES,
    ApiError,
    estimate_memory,
    parse_json_object,
    parse_request,
)
from knowgate.server.load_limits import MAX_UNFINISHED_BYTES, BodyBudget, FairLock, RequestSlots
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream import forwarding
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.server.test_circuit_breaker import use_parts
from tests.server.test_failures import FailingGate, use_gate
from tests.server.test_forwarding import FOUND
from tests.support.processes import PATIENCE, until

CHAT = '{"model":"m","messages":[{"role":"user","content":"capital?"}],"x":'


def test_request_slots_are_limited_per_client_and_in_total():
    slots = RequestSlots(3, 2)
    slots.acquire("a")
    slots.acquire("a")
    with pytest.raises(ApiError, match="in progress"):
        slots.acquire("a")
    slots.acquire("b")
    with pytest.raises(ApiError, match="in progress"):
        slots.acquire("c")
    slots.release("a")
    slots.acquire("c")
    assert (slots.count, dict(slots.count_by_client)) == (3, {"a": 1, "b": 1, "c": 1})


def test_one_client_can_use_half_of_the_memory_for_unfinished_bodies():
    budget = BodyBudget(MAX_UNFINISHED_BYTES, largest_body=MAX_UNFINISHED_BYTES)
    half = MAX_UNFINISHED_BYTES
    budget.reserve("a", half)
    with pytest.raises(ApiError, match="at once"):
        budget.reserve("a", 1)
    budget.reserve("b", half)
    with pytest.raises(ApiError, match="at once"):
        budget.reserve("c", 1)
    budget.reserve("a", -half)
    budget.reserve("c", half)
    assert budget.bytes_by_client == {"b": half, "c": half}


def test_the_default_memory_for_unfinished_bodies_is_256_mb():
    assert BodyBudget(MAX_UNFINISHED_BYTES, largest_body=4 << 20).max_bytes == 256 << 20


def test_the_memory_of_large_requests_in_progress_is_limited(serve, tmp_path):
    first, second = (add_key(tmp_path / "keys.json", name) for name in ("first", "second"))
    address, app = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    budget = app.state.service.parsed_budget
    large, small = CHAT + f'"{"x" * 70_000}"}}', CHAT + f'"{"x" * 60_000}"}}'
    needed = estimate_memory(large.encode())
    assert needed >= 140_000
    budget.max_bytes = 3 * needed
    until(lambda: not budget.bytes_by_client)
    (client,) = {key.hash for key in app.state.service.access_policy.list_keys() if key.name == "first"}
    budget.reserve(client, needed)  # a request in progress
    assert [_post(address, first, large).status_code, _post(address, second, large).status_code] == [429, 200]
    assert [_post(address, first, small).status_code, _post(address, second, small).status_code] == [200, 200]
    budget.reserve(client, -needed)
    assert _post(address, first, large).status_code == 200
    until(lambda: not budget.bytes_by_client)


def test_large_requests_that_wait_for_their_estimate_are_counted(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(load_limits, "MAX_TURN_BYTES", 0)
    key = add_key(tmp_path / "keys.json", "first")
    address, app = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    service, ends = app.state.service, threading.Event()
    service._parser_thread.submit(ends.wait, PATIENCE)
    large = CHAT + f'"{"x" * 70_000}"}}'
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(_post, address, key, large)
        until(lambda: service.parsed_budget.bytes_by_client.total() == len(large))
        ends.set()
        assert reply.result().status_code == 200
    until(lambda: not service.parsed_budget.bytes_by_client)


def test_a_few_keys_cannot_take_all_places():
    slots = RequestSlots(128, 64)

    def fill(client):
        while True:
            try:
                slots.acquire(client)
            except ApiError:
                return slots.count_by_client[client]

    assert [fill(key) for key in ("a", "b", "c", "a")] == [64, 32, 16, 64]


def test_objects_and_arrays_of_a_forwarded_body_are_limited():
    numbers = b'{"model": "m", "input": [' + b"1," * 200_000 + b'1], "x": "' + b"{[" * 50_000 + b'"}'
    assert len(json_api.parse_json_object(numbers, json_api.MAX_FORWARDED_VALUES)["input"]) == 200_001
    with pytest.raises(ApiError, match="more than 50,000 JSON objects and arrays"):
        json_api.parse_json_object(b'{"input": [' + b"{}," * 50_000 + b"1]}", json_api.MAX_FORWARDED_VALUES)


@pytest.mark.parametrize(
    ("body", "least"),
    [
        (b'{"input":[' + b'{"a":0},' * 49_990 + b"0]}", 8_000_000),
        (b'{"input":[' + b'["a"],' * 49_990 + b"0]}", 4_000_000),
        (b'{"input":[' + b"12345," * 50_000 + b"0]}", 1_500_000),
        (b'{"input":[' + b'"abc",' * 50_000 + b"0]}", 2_000_000),
        (b'{"input":"' + b"x" * 100_000 + "\N{GRINNING FACE}".encode() + b'"}', 500_000),
        (b'{"input":"' + b"x" * 100_000 + rb'\ud83d\ude00"}', 500_000),
        (b'{"input":"' + b"x" * 100_000 + b'"}', 200_000),
    ],
)
def test_the_memory_of_a_parsed_body_is_not_underestimated(body, least):
    tracemalloc.start()
    value = parse_json_object(body, MAX_FORWARDED_VALUES)
    size = tracemalloc.get_traced_memory()[0] + len(body)
    tracemalloc.stop()
    assert len(value) == 1
    assert least <= size <= 1.05 * estimate_memory(body)


def test_unfinished_bodies_of_one_key_do_not_block_another_key(serve, tmp_path):
    slow, other = (add_key(tmp_path / "keys.json", name) for name in ("slow", "other"))
    address, app = serve(gate="never", options={"keys": str(tmp_path / "keys.json"), "waiting": 4})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {slow}\r\nContent-Length: 99\r\n\r\n{{"
    )
    parts = urlsplit(address)
    connections = [socket.create_connection((parts.hostname, parts.port)) for _ in range(6)]
    for connection in connections:
        connection.sendall(head.encode())
    deadline = time.monotonic() + PATIENCE
    while app.state.service.unfinished_bodies.count < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert app.state.service.unfinished_bodies.count == 4  # the others were answered 429
    statuses = [_post(address, key, CHAT + "1}").status_code for key in (other, slow)]
    for connection in connections:
        connection.close()
    assert statuses == [200, 429]


def test_large_unfinished_bodies_of_some_keys_do_not_block_small_ones_of_another(serve, tmp_path):
    first, second, other = (add_key(tmp_path / "keys.json", name) for name in ("first", "second", "other"))
    address, app = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    budget = app.state.service.upload_budget
    budget.max_bytes = 400_000
    size = LARGE_BODY_BYTES + budget.max_bytes // 2
    with ExitStack() as connections:
        for count, key in enumerate((first, second), 1):
            connections.enter_context(_send_unfinished(address, key, size))
            until(lambda count=count: budget.bytes_by_client.total() == count * budget.max_bytes // 2)
            assert _post(address, key, CHAT + f'"{"x" * 70_000}"}}').status_code == 429
            large_status = _post(address, other, CHAT + f'"{"x" * 70_000}"}}').status_code
            assert large_status == (200 if count == 1 else 429)
            assert _post(address, other, CHAT + f'"{"x" * 60_000}"}}').status_code == 200
    until(lambda: not budget.bytes_by_client)


def _send_unfinished(address, key, size):
    """Send `size` bytes of a body that is announced as longer, and return the connection."""
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}Content-Length: {size + 10}\r\n\r\n".encode() + b"x" * size)
    return connection


def _post(address, key, content):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return httpx.post(f"{address}/v1/chat/completions", content=content, headers=headers, timeout=30)


# --- JSON -----------------------------------------------------------------------------------------


def test_json_values_are_counted_outside_strings():
    assert count_json_values(rb'{"a": "x,[{,\",,", "b": [1, 2]}', 3) == 4
    assert count_json_values(b'{"a": ",,,,', 1) == 1  # a string without an end


@pytest.mark.parametrize("piece", [b'""', b'\\"', b'"\\'], ids=["quotes", "escaped quotes", "escapes"])
def test_counting_values_takes_linear_time(piece):
    text = b"[" * 60_000 + piece * 2_000_000
    start = time.thread_time()
    count_json_values(text, 50_000)
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(("value", "count"), [("1", 1_300_000), ("[]", 900_000), ('""', 900_000)])
def test_a_request_of_many_values_is_rejected_at_once(value, count):
    body = (CHAT + "[" + f"{value}," * count + f"{value}]" + "}").encode()
    start = time.thread_time()
    with pytest.raises(ApiError, match="more than 50,000 JSON values"):
        parse_json_object(body)
    assert time.thread_time() - start < 2


def test_a_long_text_with_many_commas_is_accepted(serve):
    address, _ = serve(gate="never")
    message = {"role": "system", "content": "1,[" * 200_000}
    assert ask(address, messages=[message, {"role": "user", "content": "Who?"}]).status_code == 200


def test_many_values_are_allowed_where_no_gate_decides(serve):
    address, _ = serve(gate="never")
    body = {"model": "m", "input": list(range(100_000))}
    assert httpx.post(f"{address}/v1/embeddings", json=body, timeout=30).status_code == 200
    assert httpx.post(f"{address}/v1/completions", json={**body, "prompt": "Who?"}, timeout=30).status_code == 413


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (schemas.ChatRequest, {"messages": [[]] * 21_000}, "messages.0"),
        (schemas.DecideRequest, {"messages": [[]] * 21_000}, "messages.0"),
        (schemas.DecideRequest, {"questions": [1] * 21_000}, "questions.0"),
        (schemas.RerankRequest, {"query": "Who?", "documents": [1] * 21_000}, "documents.0.str"),
        (schemas.GatedRequest, {"knowgate": {"filter": {"id": [1] * 21_000}}}, "knowgate.filter.id.0"),
        (schemas.GatedRequest, {"knowgate": {f"x{number}": 1 for number in range(5_000)}}, "knowgate"),
        (schemas.GatedRequest, {"knowgate": {"filter": dict.fromkeys(map(str, range(5_000)))}}, "knowgate.filter"),
    ],
)
def test_a_request_of_many_invalid_values_builds_few_errors(model, body, field):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 2
    with pytest.raises(ApiError, match=f"'{field}' is invalid"):
        parse_request(model, body)


@pytest.mark.parametrize(
    ("path", "count", "runner"),
    [
        ("chat/completions", 1_000, None),
        ("chat/completions", 21_000, "run_in_turn"),
        ("embeddings", 21_000, "run_in_thread"),
    ],
)
def test_a_small_body_of_many_values_waits_for_its_turn(serve, monkeypatch, path, count, runner):
    address, _ = serve(gate="never")
    runners = []

    def record(name):
        run = getattr(load_limits, name)
        monkeypatch.setattr(load_limits, name, lambda *args: runners.append(name) or run(*args))

    record("run_in_turn")
    record("run_in_thread")
    content = CHAT + f"[{'1,' * count}1]" + ',"input":"a"}'
    assert httpx.post(f"{address}/v1/{path}", content=content, timeout=30).status_code == 200
    assert set(runners) == ({runner} if runner else set())


class SlowParser:
    """Parses bodies in a thread, but waits at the first one until it is released. `names` are those of the parsed bodies."""

    def __init__(self, app, monkeypatch):
        monkeypatch.setattr(load_limits, "MAX_TURN_BYTES", 0)
        self.calls = app.state.service._parser_thread._waiting
        self.release = threading.Event()
        self.names = []
        monkeypatch.setattr(json_api, "parse_json_object", self.parse)

    def parse(self, body, max_values):
        value = parse_json_object(body, max_values)
        self.names.append(value["user"])
        assert self.release.wait(PATIENCE)
        return value

    def wait_for(self, count):
        """Wait until as many bodies have started or wait."""
        until(lambda: len(self.names) + len(list(self.calls)) == count)


LARGE_CHAT = '{"model":"m","messages":[{"role":"user","content":"capital?"}],"x":"%s","user":"%s"}'


def test_keys_take_turns_when_large_bodies_are_parsed(serve, tmp_path, monkeypatch):
    busy, other = (add_key(tmp_path / "keys.json", name) for name in ("busy", "other"))
    address, app = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    parser = SlowParser(app, monkeypatch)
    requests = [(busy, "busy 1"), (busy, "busy 2"), (busy, "busy 3"), (other, "other")]
    with ThreadPoolExecutor(len(requests)) as pool:
        replies = []
        for count, (key, name) in enumerate(requests, 1):
            replies.append(pool.submit(_post, address, key, LARGE_CHAT % ("x" * 70_000, name)))
            parser.wait_for(count)
        parser.release.set()
        assert [reply.result().status_code for reply in replies] == [200] * len(requests)
    # Each body has two turns: its memory is estimated, then it is parsed. So "busy 2" may still be parsed before "other".
    assert sorted(parser.names) == ["busy 1", "busy 2", "busy 3", "other"]
    assert parser.names.index("other") < parser.names.index("busy 3")


def test_a_waiting_body_whose_client_has_left_is_not_parsed(serve, monkeypatch):
    address, app = serve(gate="never")
    parser = SlowParser(app, monkeypatch)
    parts = urlsplit(address)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_post, address, "x", LARGE_CHAT % ("x" * 70_000, "first"))
        parser.wait_for(1)
        body = LARGE_CHAT % ("x" * 70_000, "gone")
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            parser.wait_for(2)
        until(lambda: app.state.service.active_requests.count == 1)  # the server has noticed
        last = pool.submit(_post, address, "x", LARGE_CHAT % ("x" * 70_000, "last"))
        parser.wait_for(3)
        parser.release.set()
        assert [reply.result().status_code for reply in (first, last)] == [200, 200]
    assert parser.names == ["first", "last"]


# --- filters and searches -------------------------------------------------------------------------


@pytest.mark.parametrize("patterns", [range(300_000), ["*a" * 200], "*a" * 200], ids=["many", "long", "long alone"])
def test_a_filter_of_many_or_long_patterns_is_rejected(serve, patterns):
    address, _ = serve(gate="always")
    given = [f"a{number}*b" for number in patterns] if isinstance(patterns, range) else patterns
    reply = ask(address, knowgate={"filter": {"id": given}})
    assert reply.status_code in (400, 413)


class HangingRetriever:
    """Hangs on questions that contain "slow"."""

    name, fingerprint = "hanging", "hanging"

    def __init__(self):
        self.let_go = threading.Event()

    def search(self, queries, k):
        if "slow" in queries[0]:
            self.let_go.wait(PATIENCE)
        return [FOUND for _ in queries]


def test_a_search_that_hangs_does_not_block_the_next_one(serve):
    retriever = HangingRetriever()
    address, app = serve(gate="always", change=use_parts(seconds=0.2, retriever=retriever))
    service = app.state.service.gate_service
    for _ in range(MAX_ABANDONED_SEARCHES):
        report = ask(address, messages=[{"role": "user", "content": "a slow question?"}]).json()["knowgate"]
        assert report["degraded"] == ["retriever"]
        service.retriever_breakers.get("").record_success()
        report = ask(address, messages=[{"role": "user", "content": UNKNOWN}]).json()["knowgate"]
        assert (report["degraded"], len(report["passages"])) == ([], 1)
    retriever.let_go.set()


def test_newlines_in_a_question_do_not_block_the_server(serve):
    address, _ = serve(gate="always")
    start = time.process_time()  # on a busy machine, waiting takes long
    for question in ("\n" * 19_990 + "x", "a" + "\n" * 19_980 + "x"):
        assert ask(address, messages=[{"role": "user", "content": question}]).status_code == 200
    assert time.process_time() - start < 10  # it took more than five seconds per request


LONG = "zebra and " * 2_001  # more than 20,000 characters


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("fields", [{"question": LONG}, {"questions": ["short?", LONG]}, {"messages": [user(LONG)]}])
def test_a_question_above_the_limit_is_not_decided(serve, fields):
    address, _ = serve(gate="always")
    reply = httpx.post(f"{address}/v1/decide", json=fields, timeout=30)
    assert (reply.status_code, "20" in reply.json()["error"]["message"]) == (400, True)


class CountingGate(FailingGate):
    """A gate that only computes, so that short questions are decided at once. It collects what it is asked."""

    is_pure = True

    def __init__(self):
        super().__init__(self.count)
        object.__setattr__(self, "questions", [])

    def count(self, questions):
        self.questions.extend(question.text for question in questions)
        return [0.0 for _ in questions]


class WaitingGate(FailingGate):
    """A gate that only computes, but takes long."""

    is_pure = True


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
@pytest.mark.parametrize("path", ["chat/completions", "decide", "responses"])
def test_a_long_earlier_message_is_not_joined_with_a_follow_up(serve, path, role):
    gate = CountingGate()
    address, _ = serve(gate="always", change=use_gate(gate))
    messages = [user("Who wrote Emma?"), {"role": "assistant", "content": "Jane Austen"}, user("And when?")]
    if role in ("user", "assistant"):
        messages[role == "assistant"] = {"role": role, "content": LONG}
    else:
        messages.insert(0, {"role": role, "content": LONG})
    body = {"input" if path == "responses" else "messages": messages}
    assert httpx.post(f"{address}/v1/{path}", json=body, timeout=30).status_code == 200
    assert gate.questions == ["And when?" if role == "user" else "Who wrote Emma? And when?"]


def test_a_joined_question_does_not_exceed_the_limit(serve):
    gate = CountingGate()
    address, _ = serve(gate="always", change=use_gate(gate))
    follow_up = "And when was it, " + "really " * 1_500
    messages = [user(LONG[:15_000]), {"role": "assistant", "content": "yes"}, user(follow_up)]
    assert ask(address, messages=messages).status_code == 200
    assert gate.questions == [follow_up]


@pytest.mark.parametrize(("path", "module"), [("chat/completions", forwarding), ("decide", decisions)])
def test_the_question_of_a_long_chat_is_extracted_in_the_thread_that_serves_keys_in_turn(
    serve, monkeypatch, path, module
):
    def extract_question(*args):
        threads.append(threading.current_thread().name)
        return request_formats.extract_question(*args)

    threads = []
    monkeypatch.setattr(module, "extract_question", extract_question)
    address, _ = serve(gate="never")
    for earlier in ("Who wrote Emma?", "a? " * 6000):
        roles = {"user": earlier, "assistant": "Jane Austen."}
        messages = [{"role": role, "content": text} for role, text in [*roles.items(), ("user", "When was she born?")]]
        body = {"messages": messages} if path == "decide" else {"model": "m", "messages": messages}
        assert httpx.post(f"{address}/v1/{path}", json=body).status_code == 200
    short, long = threads
    assert (short.startswith("knowgate-model"), long.startswith("knowgate-model")) == (False, True)


def test_a_slow_decision_on_a_long_question_is_stopped(serve):
    let_go = threading.Event()
    address, _ = serve(gate="always", change=use_gate(WaitingGate(lambda questions: let_go.wait(PATIENCE))))
    reply = httpx.post(f"{address}/v1/decide", json={"question": LONG[:19_000]}, timeout=30).json()
    let_go.set()
    assert (reply["degraded"], reply["retrieve"]) == (["gate"], True)


@pytest.mark.parametrize("path", ["chat/completions", "decide", "completions"])
def test_own_rules_are_tried_once_for_each_question(serve, path, monkeypatch):
    texts, decide = [], RuleSet.decide
    monkeypatch.setattr(RuleSet, "decide", lambda self, text, *args: texts.append(text) or decide(self, text, *args))
    address, _ = serve(gate="logprob:mean")
    body = {"chat/completions": {"messages": [user(UNKNOWN)]}, "decide": {"question": UNKNOWN}}.get(path)
    assert httpx.post(f"{address}/v1/{path}", json=body or {"prompt": UNKNOWN}, timeout=30).status_code == 200
    assert texts == [UNKNOWN]


def test_questions_of_a_list_are_normalized_and_matched_with_rules_in_a_thread(serve, monkeypatch):
    threads, decide = [], RuleSet.decide

    def record_thread(work):
        return lambda *args: threads.append(threading.current_thread().name) or work(*args)

    monkeypatch.setattr(decisions, "is_too_long", record_thread(is_too_long))
    monkeypatch.setattr(RuleSet, "decide", record_thread(decide))
    address, _ = serve(gate="random")
    ligature = "\ufdfa"  # becomes 18 letters
    reply = httpx.post(f"{address}/v1/decide", json={"questions": [ligature * 200, "é" * 1_200]}, timeout=30)
    assert reply.status_code == 200
    assert len(threads) == 3  # two questions for the rules, and one that could be too long
    assert all(name.startswith("knowgate-model") for name in threads)
    reply = httpx.post(f"{address}/v1/decide", json={"questions": [UNKNOWN, ligature * 1_200]}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_question")
    assert "'questions.1' is invalid: the question has more than 20,000" in reply.json()["error"]["message"]


def test_the_names_of_ignored_fields_are_shortened(serve):
    address, _ = serve(upstream=False, gate="never")
    report = ask(address, model="knowgate", messages=[user(UNKNOWN)], **{"x" * 100_000: 1}).json()["knowgate"]
    assert report["ignored"] == ["x" * 80]


def test_a_body_above_the_limit_is_rejected(serve):
    address, _ = serve(gate="never", options={"largest_body": 2048})
    reply = httpx.post(f"{address}/v1/chat/completions", content=json.dumps({"a": "x" * 3000}), timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_long")


# --- API keys take turns --------------------------------------------------------------------------


class SlowJudge:
    """A judge that reads the first question until others wait. It records the questions in order."""

    def __init__(self):
        self.order = []
        self.has_started = threading.Event()
        self.may_go_on = threading.Event()

    def score(self, questions):
        self.order.append(questions[0].text)
        self.has_started.set()
        assert self.may_go_on.wait(PATIENCE)
        return [1.0]

    def are_useful(self, questions, passages):
        return [bool(score) for score in self.score(questions)]


def serve_slow_judge(serve, judge, role, options):
    """Start a server with a slow judge as gate or second look. Return its address and its queue."""
    parts = {"gate": FailingGate(judge.score)} if role == "gate" else {"second_look": judge}
    address, app = serve(gate="always", options=options, change=use_parts(PATIENCE, **parts))
    service = app.state.service.gate_service
    return address, service._gate_thread._waiting if role == "gate" else service._search_lock._waiters


@pytest.mark.parametrize("role", ["gate", "second look"])
def test_a_local_judge_serves_keys_in_turn(serve, tmp_path, role):
    file, judge = tmp_path / "keys.json", SlowJudge()
    keys = {name: add_key(file, name) for name in ("alice", "bob")}
    address, queue = serve_slow_judge(serve, judge, role, {"keys": str(file)})

    def send(name, number):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{UNKNOWN} {name}{number}"}]}
        headers = {"Authorization": f"Bearer {keys[name]}"}
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)

    with ThreadPoolExecutor(5) as pool:
        replies = [pool.submit(send, "alice", 0)]
        assert judge.has_started.wait(PATIENCE)
        for number, name in enumerate(("alice", "alice", "alice", "bob")):
            replies.append(pool.submit(send, name, number))
            until(lambda expected=number + 1: len(list(queue)) == expected)
        judge.may_go_on.set()
        assert [reply.result().json()["knowgate"]["degraded"] for reply in replies] == [[]] * 5
    assert [text.split()[-1][:-1] for text in judge.order] == ["alice", "bob", "alice", "alice", "alice"]


def test_a_cancelled_task_passes_a_fair_lock_on():
    async def run():
        lock, order = FairLock(), []

        async def work(name):
            CLIENT.set(name)
            async with lock:
                order.append(name)

        async with lock:
            tasks = [asyncio.create_task(work(name)) for name in ("a", "b", "c")]
            await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.sleep(0)
        tasks[1].cancel()  # it has the lock, but has not run yet
        await asyncio.gather(*tasks, return_exceptions=True)
        async with lock:
            return order

    assert asyncio.run(run()) == ["c"]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ('{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}', {}),
        ('{"messages": [{"role": "user", "content": "Who wrote Emma?"}], "stream": true}', {}),
        ('{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}', {"deadline": 0.3}),
        ("{", {}),
    ],
    ids=["plain", "stream", "late", "invalid"],
)
def test_the_memory_of_a_request_is_free_without_garbage_collection(serve, stub, content, options):
    """Large bodies would fill the memory until then, because garbage is collected by the number of objects."""
    address, _ = serve(gate="logprob:mean", options=options)
    stub.slow = 0.1 if "deadline" not in options else 1.0  # a request that takes longer notices disconnections

    def find_requests():
        # not isinstance(): it runs code of the objects, and some of other tests warn
        kinds = (RequestTrace, RequestResponseCycle, Request)
        return [item for item in gc.get_objects() if issubclass(type(item), kinds)]

    earlier = find_requests()  # of other tests
    known = set(map(id, earlier))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            headers = {"content-type": "application/json", "connection": "close"}
            httpx.post(f"{address}/v1/chat/completions", content=content, headers=headers)
        until(lambda: not [item for item in find_requests() if id(item) not in known])
    finally:
        gc.enable()


def test_garbage_is_collected_when_the_memory_has_grown(monkeypatch):
    collected, memory = [], iter([100, 100, 100, 150, 90, 90, 90, 200, 201, 80, 80])
    monkeypatch.setattr(load_limits, "GARBAGE_SECONDS", 0.0)
    monkeypatch.setattr(load_limits, "GARBAGE_BYTES", 100)
    monkeypatch.setattr(load_limits, "_measure_memory", lambda: next(memory))
    monkeypatch.setattr(load_limits.gc, "collect", lambda: collected.append(1))
    with pytest.raises(RuntimeError):  # the end of `memory`
        asyncio.run(load_limits.collect_large_garbage())
    assert collected == [1]


@pytest.mark.parametrize(("has_calls", "is_interruptible"), [(True, True), (False, True), (True, False)])
def test_the_event_loop_stops_for_as_long_as_it_worked_while_an_llm_on_a_cpu_works(
    monkeypatch, has_calls, is_interruptible
):
    pauses, times = [], iter([1.0, 1.5, 2.0, 2.03, 3.0])
    monkeypatch.setattr(load_limits, "REST_SECONDS", 0.0)
    monkeypatch.setattr(load_limits.time, "thread_time", lambda: next(times))
    monkeypatch.setattr(load_limits.time, "sleep", pauses.append)
    monkeypatch.setattr(FakeModel, "is_interruptible", is_interruptible)
    monkeypatch.setattr(FairExecutor, "has_calls", has_calls)
    model = FakeModel()
    with pytest.raises(RuntimeError):  # the end of `times`
        asyncio.run(load_limits.share_processor(lambda: model))
    assert [round(pause, 3) for pause in pauses] == ([0.1, 0.03] if has_calls and is_interruptible else [])


def test_a_single_body_fits_whatever_its_estimate():
    budget = BodyBudget(100, largest_body=1)
    budget.reserve("a", 1_000)
    with pytest.raises(ApiError, match="at once"):
        budget.reserve("b", 1)


@pytest.mark.parametrize(
    ("size", "values", "is_in_turn"), [(4 << 20, 50_000, True), (5 << 20, 10, False), (1 << 20, 50_001, False)]
)
def test_long_json_is_read_in_a_thread(size, values, is_in_turn):
    with ThreadPoolExecutor(1) as pool:
        assert (load_limits.choose_runner(pool, size, values) is load_limits.run_in_turn) is is_in_turn


def test_large_requests_are_read_one_after_the_other_and_keys_take_turns():
    order = []

    async def read(name):
        CLIENT.set(name[0])
        await load_limits.run_in_turn(lambda: order.append(name))

    async def read_all():
        await asyncio.gather(*map(read, ("a1", "a2", "a3", "b1")))

    asyncio.run(read_all())
    assert order == ["a1", "b1", "a2", "a3"]
