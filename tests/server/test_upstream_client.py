"""The client of the upstream: its URL and its timeouts."""

import asyncio
import itertools
import json
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from starlette.datastructures import Headers

import knowgate as kg
from knowgate.server.dashboard.page import name_model
from knowgate.server.options import ServeOptions
from knowgate.server.upstream import client
from knowgate.server.upstream.client import UpstreamClient, UpstreamConnection
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.support.hostile_server import http
from tools.stub_upstream import Stub


def test_an_upstream_that_sends_no_first_byte_in_time_is_504(serve, stub):
    stub.waits_for = threading.Event()
    address, app = serve(gate="never", options={"first_byte_seconds": 0.2})
    reply = ask(address)
    stub.waits_for.set()
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")
    assert app.state.service.forwarder.upstream.breaker.failure_count == 1


def test_a_stream_may_take_longer_than_its_first_byte(serve, stub):
    stub.slow = 0.4  # four words: longer than the limit, but no pause comes near it
    address, _ = serve(gate="never", options={"first_byte_seconds": 1.2})
    assert ask(address, stream=True).text.endswith("data: [DONE]\n\n")


def test_a_connection_that_is_not_accepted_in_time_is_502(serve):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        # Fill the queue of the listener, so that further connections wait.
        waiting = [socket.socket() for _ in range(4)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        options = {"upstream": f"http://127.0.0.1:{port}/v1", "connect_seconds": 0.2}
        address, _ = serve(upstream=False, gate="never", options=options)
        reply = ask(address)
        for connection in waiting:
            connection.close()
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_unreachable")


class ClosingUpstream:
    """Answers the first request of its first connections, then closes each of them when a second request arrives.

    Args:
        last_bytes: What it sends before it closes a connection.
        closing: Number of connections that it closes like this. Later ones answer every request.
    """

    def __init__(self, last_bytes=b"", closing=1):
        self.last_bytes, self.closing, self.requests = last_bytes, closing, []
        self.numbers = itertools.count()  # of the connections
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(connection, next(self.numbers)), daemon=True).start()

    def forget_requests(self):
        self.numbers = itertools.count()
        self.requests.clear()

    def answer(self, connection, number):
        with connection, connection.makefile("rb") as file:
            for count in itertools.count():
                lines = list(
                    itertools.takewhile(lambda line: line.strip(), file)
                )  # the end of the connection ends it, too
                if not lines:
                    return
                length = next((int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")), 0)
                self.requests.append((number, json.loads(file.read(length) or b"null")))
                if count and number < self.closing:
                    connection.sendall(self.last_bytes)
                    return
                body = b'{"choices": [{"message": {"content": "42"}, "finish_reason": "stop"}]}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def ask_closing(serve, upstream):
    """Ask twice one after the other, and return the second response."""
    address, app = serve(upstream=False, gate="never", options={"upstream": upstream.url})
    upstream.forget_requests()  # at start, the server checks that it can be reached
    with httpx.Client(base_url=address, timeout=30) as client:
        for _ in range(2):
            body = {"model": "m", "messages": [{"role": "user", "content": UNKNOWN}]}
            reply = client.post("/v1/chat/completions", json=body)
    return reply, app.state.service.forwarder.upstream.breaker


def test_a_request_is_sent_again_if_an_idle_connection_is_closed(serve):
    upstream = ClosingUpstream()
    reply, breaker = ask_closing(serve, upstream)
    assert (reply.status_code, breaker.failure_count) == (200, 0)
    assert [number for number, body in upstream.requests if body is not None] == [0, 0, 1]
    assert upstream.requests[-1] == (1, upstream.requests[-2][1])


@pytest.mark.parametrize("last_bytes", [b"H", b"HTTP/1.1 200 OK\r\nContent-"])
def test_a_request_whose_response_has_begun_is_not_sent_again(serve, last_bytes):
    upstream = ClosingUpstream(last_bytes)
    reply, _ = ask_closing(serve, upstream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert len([body for _, body in upstream.requests if body is not None]) == 2


def test_a_request_on_a_new_connection_is_not_sent_again(serve, monkeypatch):
    upstream = ClosingUpstream()
    monkeypatch.setattr(
        upstream, "answer", lambda connection, number: (upstream.requests.append(number), connection.close())
    )
    reply, _ = ask_closing(serve, upstream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert len(upstream.requests) == 2  # one connection for each of the two questions


@pytest.mark.parametrize(("seconds", "expected"), [(None, 9.0), (3.0, 3.0), (30.0, 9.0)])
def test_the_first_byte_must_come_before_the_deadline(seconds, expected):
    """A request that is canceled at the deadline would not count as a failure of the upstream."""
    client = UpstreamClient("http://a/v1", ServeOptions(deadline=10.0, first_byte_seconds=seconds))
    assert client._first_byte_timeout == pytest.approx(expected)


def test_the_url_of_the_upstream_is_normalized():
    assert ServeOptions(upstream="http://a/v1/").upstream == "http://a/v1"


@pytest.mark.parametrize(
    "url", ["ftp://me:secret@a/v1", "http://me:secret@a/v1,weight=3", "http://me:secret@a/v1,http://b/v1", "a:8000/v1"]
)
def test_an_invalid_url_is_rejected_without_its_login(url):
    with pytest.raises(kg.KnowgateError, match="is not a valid URL") as caught:
        ServeOptions(upstream=url)
    assert "secret" not in str(caught.value)


def test_a_login_in_the_url_is_sent_as_a_header_and_not_with_the_key_of_the_client():
    client = UpstreamClient("http://me:secret@127.0.0.1:1/v1", ServeOptions())
    headers = client._build_headers(Headers({"authorization": "Bearer sk-client"}))
    assert headers["Authorization"] == "Basic bWU6c2VjcmV0"
    assert client.url == "http://127.0.0.1:1/v1"


@pytest.fixture
def models_by_key(monkeypatch):
    """An upstream that lists to each client its own models."""

    async def models(stub, request):
        name = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return web.json_response({"data": [{"id": f"model-of-{name}"}]})

    monkeypatch.setattr(Stub, "models", models)


def test_each_client_with_its_own_key_gets_the_first_of_its_own_models(models_by_key, serve, stub):
    address, app = serve(gate="never")
    body = {"model": "knowgate", "messages": [{"role": "user", "content": UNKNOWN}]}
    for name in ("alice", "bob", "alice"):
        httpx.post(f"{address}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {name}"}, timeout=30)
    assert [sent["model"] for sent in stub.bodies] == ["model-of-alice", "model-of-bob", "model-of-alice"]
    assert name_model(app.state.service) == f"the LLM at {stub.url}"


@pytest.fixture
def model_list(monkeypatch):
    """The reply of the upstream to GET /models: its status, and the names of its models."""
    reply = {"status": 200, "names": ["old-llm"]}

    async def models(stub, request):
        data = [{"id": name} for name in reply["names"]]
        return web.json_response({"data": data}, status=reply["status"], headers={"Retry-After": "7"})

    monkeypatch.setattr(Stub, "models", models)
    return reply


def test_the_upstream_is_asked_for_its_first_model_again_after_a_minute(model_list, serve, stub):
    address, app = serve(gate="never")
    cache = app.state.service.forwarder.upstream._default_models
    ask(address, model="knowgate")
    model_list["names"] = ["new-llm"]
    ask(address, model="knowgate")
    for account, (name, expires) in cache.items():
        cache[account] = (name, expires - 60)
    ask(address, model="knowgate")
    assert [sent["model"] for sent in stub.bodies] == ["old-llm", "old-llm", "new-llm"]


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_an_error_of_the_list_of_models_is_the_error_of_a_request_without_a_model(model_list, serve, status):
    address, _ = serve(gate="never")
    model_list["status"] = status
    reply = ask(address, model="knowgate")
    retry_after = None if status == 404 else "7"
    assert (reply.status_code, reply.headers.get("retry-after")) == (status, retry_after)
    # A server without such a list has no models of its own to show.
    assert httpx.get(f"{address}/v1/models").status_code == (200 if status == 404 else status)


def test_a_connection_reads_less_at_a_time_if_that_takes_long(monkeypatch):
    async def read():
        transport, seconds = SimpleNamespace(max_size=0, get_extra_info=lambda name: None, abort=print), [0.0]
        connection = UpstreamConnection(asyncio.get_running_loop())
        connection.connection_made(transport)
        clock = iter(range(1_000))
        monkeypatch.setattr(client.time, "perf_counter", lambda: next(clock) * seconds[0])
        sizes = [transport.max_size]
        for duration in [0.0001] * 7 + [0.1] * 7:
            seconds[0] = duration
            connection.data_received(b"x" * sizes[-1])
            connection.data_received(b"")  # as aiohttp does when it continues to read
            sizes.append(transport.max_size)
        return sizes

    monkeypatch.setattr(ResponseHandler, "data_received", lambda self, data: None)
    rising = [1 << n for n in range(10, 17)]
    assert asyncio.run(read()) == [*rising, 1 << 16, *reversed(rising[:-1]), 1 << 10]


def test_a_response_that_nobody_asked_for_is_not_given_to_the_next_request(serve):
    """An upstream, or a proxy before it, may send a response twice."""

    def answer(server):
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=talk, args=[connection], daemon=True).start()

    def talk(connection):
        with connection, suppress(OSError):
            while request := connection.recv(65536):
                completion = json.dumps(make_completion(request)).encode()
                response = http(completion, content_type="application/json", connection="keep-alive")
                connection.sendall(response)
                time.sleep(0.2)
                if b"twice" in request:
                    connection.sendall(response)

    def make_completion(request):
        text = "twice" if b"twice" in request else "once"
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=[server], daemon=True).start()
        upstream = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        address, _ = serve(upstream=False, gate="never", options={"upstream": upstream})
        answers = []
        for question in ("Answer twice?", "Answer once?", "Answer once more?"):
            answers.append(ask(address, question, model="m").json()["choices"][0]["message"]["content"])
            time.sleep(0.4)
        assert answers == ["twice", "once", "once"]
