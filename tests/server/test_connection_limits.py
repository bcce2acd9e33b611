"""Connections: headers are limited in size, number and time, and old half-open connections make room for others."""

import asyncio
import json
import logging
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import Response

from knowgate.server import connection_limits
from knowgate.server.app import EndpointApp
from knowgate.server.auth.api_keys import add_key
from knowgate.server.client_connection import ABORT_EXTENSION
from knowgate.server.connection_limits import REQUESTS_PER_TURN, RequestTurns
from knowgate.server.entrypoint import build_uvicorn_options, raise_open_file_limit
from knowgate.server.load_limits import FairLock
from knowgate.server.options import ServeOptions
from knowgate.server.upstream.forwarding import UpstreamForwarder
from tests.server.test_arbitration import FixedArbiter, use_arbiter
from tests.server.test_chat import ask
from tests.support.hostile_server import HostileServer, http
from tests.support.processes import until


def connect(address):
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def read_all(connection):
    """Read until the server closes the connection."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


def test_headers_of_many_bytes_are_rejected(serve):
    address, _ = serve(gate="never")
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
        sent = 0
        try:
            while sent < 40 << 20:
                sent += connection.send(b"a" * (1 << 16))
            received = b""
        except ConnectionError:
            received = b""
        received = received or read_all(connection)
    assert sent < 40 << 20  # the server stopped reading
    assert received == b"" or received.startswith(b"HTTP/1.1 431")


def test_a_long_header_is_answered_431(serve):
    address, _ = serve(gate="never")
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (40 << 10))
        assert read_all(connection).startswith(b"HTTP/1.1 431")


def send(address, data):
    """Send a whole request in one piece, and return the whole response."""
    with connect(address) as connection:
        connection.sendall(data)
        return read_all(connection)


HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"X-A: " + b"a" * (33 << 10) + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(60)) + b"\r\n",
        HEAD.replace(b"/health", b"/health?a=" + b"a" * (33 << 10)) + b"\r\n",
    ],
    ids=["one header", "many headers", "address"],
)
def test_complete_headers_that_are_too_large_are_answered_431(serve, request_bytes):
    assert send(serve(gate="never")[0], request_bytes).startswith(b"HTTP/1.1 431")


def test_a_large_trailer_is_answered_431(serve):
    head = b"POST /v1/decide HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    trailer = b"X-A: " + b"a" * (33 << 10)
    assert send(serve(gate="never")[0], head + b"2\r\n{}\r\n0\r\n" + trailer + b"\r\n\r\n").startswith(b"HTTP/1.1 431")


def test_headers_below_the_limit_are_accepted(serve):
    request_bytes = HEAD + b"X-A: " + b"a" * (31 << 10) + b"\r\n\r\n"
    assert send(serve(gate="never")[0], request_bytes).startswith(b"HTTP/1.1 200")


def test_many_headers_are_rejected(serve):
    address, _ = serve(gate="never")
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400")


def test_a_large_body_does_not_count_as_headers(serve):
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * 300_000}]}
    with httpx.Client(timeout=30) as client:
        statuses = [client.post(f"{address}/v1/chat/completions", json=body).status_code for _ in range(3)]
        statuses.append(client.get(f"{address}/health").status_code)
    assert statuses == [200] * 4


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: "])
def test_headers_have_a_time_limit(serve, monkeypatch, start):
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.3)
    address, _ = serve(gate="never")
    with connect(address) as connection:
        connection.sendall(start)
        assert read_all(connection).startswith(b"HTTP/1.1 408")


CHUNKED_HEAD = b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_trailers_have_a_time_limit(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.3)
    address, _ = serve(gate="never")
    assert send(address, CHUNKED_HEAD + b"2\r\n{}\r\n0\r\nX-A: b").startswith(b"HTTP/1.1 408")


def test_slow_trailers_after_an_early_response_get_no_second_response(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(connection_limits, "LINGER_SECONDS", 0.5)
    address, _ = serve(gate="never")
    reply = send(address, CHUNKED_HEAD.replace(b"localhost", b"x") + b"2\r\n{}\r\n0\r\nX-A: b")
    assert (reply[:12], reply.count(b"HTTP/1.1")) == (b"HTTP/1.1 403", 1)


def test_a_chunked_body_with_pauses_between_its_chunks_is_read(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.3)
    address, _ = serve(gate="never")
    body = b'{"question":"Who wrote Emma?"}'
    with connect(address) as connection:
        connection.sendall(CHUNKED_HEAD + b"%x\r\n%b" % (len(body), body[:5]))
        time.sleep(0.6)
        connection.sendall(body[5:] + b"\r\n")
        time.sleep(0.6)
        connection.sendall(b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("host", [b"localhost", b"x"])  # the second one is refused before its body is read
def test_a_body_of_many_small_chunks_is_rejected_before_it_is_parsed(serve, host):
    address, _ = serve(gate="never")
    before = time.process_time()
    with connect(address) as connection, suppress(OSError):  # the server closes the connection
        connection.sendall(CHUNKED_HEAD.replace(b"localhost", host) + b"1\r\nx\r\n" * 1_000_000)
        reply = read_all(connection)
        assert reply[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 403", b"")
    assert time.process_time() - before < 1.5  # all of them would take several seconds


def test_a_body_of_small_chunks_that_are_not_too_many_is_read(serve):
    address, _ = serve(gate="never")
    body = b'{"question":"Who wrote Emma?"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert send(address, CHUNKED_HEAD + chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_small_chunks_that_arrive_together_start_few_timers(serve, monkeypatch):
    starts = []
    wait = connection_limits.LimitedHttpProtocol._wait_for_headers
    monkeypatch.setattr(
        connection_limits.LimitedHttpProtocol, "_wait_for_headers", lambda self: starts.append(1) or wait(self)
    )
    assert get_statuses(send(serve(gate="never")[0], CHUNKED_HEAD + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n")) == [400]
    assert len(starts) < 100  # with a timer for each chunk, parsing took several times as long


def test_queued_requests_share_one_limit_of_small_chunks(serve):
    queued = CHUNKED_HEAD.replace(b"Connection: close\r\n", b"") + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n"
    assert len(get_statuses(send(serve(gate="never")[0], queued * 10))) < 5


def test_an_endless_extension_of_a_chunk_is_rejected(serve):
    address, _ = serve(gate="never")
    with connect(address) as connection:
        connection.sendall(CHUNKED_HEAD + b"1;")
        sent = 0
        with suppress(OSError):
            while sent < 50_000_000:
                sent += connection.send(b"x" * 10_000)
    assert sent < 10_000_000


def test_half_open_requests_do_not_stop_health(serve):
    address, _ = serve(gate="never")
    connections = [connect(address) for _ in range(300)]
    for connection in connections:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: ")
    start = time.perf_counter()
    assert httpx.get(f"{address}/health", timeout=10).status_code == 200
    assert time.perf_counter() - start < 5
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("limit", ["MAX_WAITING_PER_ADDRESS", "MAX_WAITING"])
def test_new_connections_replace_old_half_open_ones(serve, monkeypatch, limit):
    monkeypatch.setattr(connection_limits, limit, 2)
    monkeypatch.setattr(connection_limits, "MIN_EVICTION_SECONDS", 0.0)
    address, _ = serve(gate="never")
    connections = [connect(address) for _ in range(4)]
    assert read_all(connections[0]) == b""
    connections[3].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    assert b'"status":"ok"' in read_all(connections[3])
    for connection in connections:
        connection.close()


def test_connections_per_address_are_limited(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    address, _ = serve(gate="never")
    connections = [connect(address) for _ in range(3)]
    assert read_all(connections[2]) == b""
    for connection in connections:
        connection.close()

    def is_free():
        try:
            return httpx.get(f"{address}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    until(is_free)


# --- requests of one connection ---------------------------------------------------------------------

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}'
SMUGGLED = b"GET /health?smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def make_upgrade(protocol, body, connection=b"Upgrade, HTTP2-Settings"):
    """Return the headers of a chat request that asks for another protocol, as Java's client does."""
    lines = [
        b"POST /v1/chat/completions HTTP/1.1", b"Host: 127.0.0.1", b"Content-Type: application/json",
        b"Content-Length: %d" % len(body), b"Connection: " + connection, b"Upgrade: " + protocol,
        b"HTTP2-Settings: AAMAAABkAAQAAP__", b"", b"",
    ]  # fmt: skip
    return b"\r\n".join(lines)


def get_statuses(response):
    return [int(part[:3]) for part in response.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_the_body_of_a_request_with_an_upgrade_is_read(serve, protocol):
    request_bytes = make_upgrade(protocol, BODY, b"close, Upgrade, HTTP2-Settings") + BODY
    assert get_statuses(send(serve(gate="never")[0], request_bytes)) == [200]


def test_the_body_of_a_request_with_an_upgrade_is_not_taken_for_a_request(serve):
    with connect(serve(gate="never")[0]) as connection:
        connection.sendall(make_upgrade(b"h2c", SMUGGLED))
        time.sleep(0.2)  # the body arrives in a later packet
        connection.sendall(SMUGGLED + HEAD + b"\r\n")
        response = read_all(connection)
    assert get_statuses(response) == [400, 200]  # the body is not JSON; the request after it is answered


def test_queued_requests_of_a_connection_are_limited(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "MAX_QUEUED_REQUESTS", 3)
    get = HEAD.replace(b"Connection: close\r\n", b"") + b"\r\n"
    assert get_statuses(send(serve(gate="never")[0], get * 1000)) == [200] * 4


def test_a_few_queued_requests_are_answered_in_order(serve):
    get = HEAD.replace(b"Connection: close\r\n", b"") + b"\r\n"
    wrong = get.replace(b"/health", b"/nothing")
    assert get_statuses(send(serve(gate="never")[0], get + wrong + get + HEAD + b"\r\n")) == [200, 404, 200, 200]


def test_requests_before_an_invalid_one_are_answered(serve):
    get = HEAD.replace(b"Connection: close\r\n", b"") + b"\r\n"
    assert get_statuses(send(serve(gate="never")[0], get + get + b"nonsense\r\n\r\n")) == [200, 200]


CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("coding", "status"),
    [(b"chunked", 200), (b"Chunked", 200), (b"gzip, chunked", 501), (b"gzip\r\nTransfer-Encoding: chunked", 501)],
)
def test_chunked_is_the_only_transfer_encoding(serve, coding, status):
    request_bytes = POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + CHUNKS
    assert get_statuses(send(serve(gate="never")[0], request_bytes)) == [status]


def test_http_1_0_has_no_transfer_encoding(serve):
    request_bytes = POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
    assert get_statuses(send(serve(gate="never")[0], request_bytes)) == [400]


@pytest.mark.parametrize(("version", "status"), [(b"1.1", 400), (b"1.0", 200)])
def test_only_http_1_0_needs_no_host(serve, version, status):
    request_bytes = b"GET /health HTTP/" + version + b"\r\nConnection: close\r\n\r\n"
    assert get_statuses(send(serve(gate="never")[0], request_bytes)) == [status]


@pytest.mark.parametrize("start", [b"CONNECT example.com:443 HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n"])
def test_connect_and_two_hosts_are_bad_requests(serve, start):
    assert get_statuses(send(serve(gate="never")[0], start + b"Host: 127.0.0.1\r\n\r\n")) == [400]


def test_a_body_that_trickles_after_the_response_does_not_keep_the_connection(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "LINGER_SECONDS", 0.5)
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n\r\n"
    with connect(serve(gate="never")[0]) as connection:
        connection.sendall(head)
        response = connection.recv(65536)
        assert response.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in response.lower()

        def is_closed():
            try:
                connection.send(b"a")
            except ConnectionError:
                return True
            return False

        until(is_closed)


def test_a_client_that_sends_a_large_body_reads_the_early_response(serve):
    response = httpx.post(f"{serve(gate='never')[0]}/v1/nothing", content=b"a" * (20 << 20), timeout=30)
    assert (response.status_code, response.headers["connection"]) == (404, "close")


def test_a_new_connection_gets_the_place_of_the_one_that_it_replaces(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_ADDRESS", 3)
    monkeypatch.setattr(connection_limits, "MAX_WAITING_PER_ADDRESS", 2)
    monkeypatch.setattr(connection_limits, "MIN_EVICTION_SECONDS", 0.0)
    address, _ = serve(gate="never")
    connections = [connect(address) for _ in range(3)]
    time.sleep(0.1)
    assert get_statuses(send(address, HEAD + b"\r\n")) == [200]
    for connection in connections:
        connection.close()


def test_rejected_requests_are_logged_once_a_second(serve, caplog):
    address, _ = serve(gate="never")
    for _ in range(5):
        send(address, b"nonsense\r\n\r\n")
    lines = [line for line in caplog.messages if "rejected with status 400" in line]
    assert 1 <= len(lines) <= 2


def test_streams_to_http_1_0_clients_are_not_chunked(serve):
    address, _ = serve(gate="never")
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "Who wrote Emma?"}]}'
    head = b"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    headers, _, content = send(address, head + body).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in headers
    assert content.startswith(b"data: ")
    assert content.endswith(b"data: [DONE]\n\n")


def test_an_invalid_chunk_size_is_answered_400(serve):
    address, _ = serve(gate="never")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert send(address, head + b"zz\r\n{}\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_health_check_with_head_is_answered_under_full_load(serve):
    address, app = serve(gate="never", options={"waiting": 1})
    with app.state.service.active_requests.hold("another client"):
        assert httpx.head(f"{address}/health").status_code == 200
        assert httpx.post(f"{address}/v1/decide", json={"question": "Who?"}).status_code == 429
    assert httpx.post(f"{address}/v1/decide", json={"question": "Who?"}).status_code == 200


@pytest.mark.parametrize(
    ("soft_limit", "hard_limit", "expected"),
    [(256, 20_000, [16_384]), (256, 1_024, [1_024]), (65_536, 65_536, []), (1_024, -1, [16_384])],
)
def test_a_server_raises_its_limit_of_open_files(monkeypatch, caplog, soft_limit, hard_limit, expected):
    limits = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft_limit, hard_limit))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair[0]))
    raise_open_file_limit()
    assert limits == expected
    assert ("can open only 1024 files" in caplog.text) == (hard_limit == 1_024)


def test_few_requests_start_in_each_iteration_of_the_event_loop_and_addresses_take_turns():
    async def start_requests():
        turns, started, counts = RequestTurns(), [], []

        async def start(address):
            await turns.wait(address)
            started.append(address)

        addresses = [*["busy"] * 100, *map(str, range(5)), "last"]
        tasks = [asyncio.ensure_future(start(address)) for address in addresses]
        while len(started) < len(tasks):
            await asyncio.sleep(0)
            counts.append(len(started))
        return started, counts

    started, counts = asyncio.run(start_requests())
    assert "last" in started[: 2 * REQUESTS_PER_TURN]
    assert max(after - before for before, after in pairwise([0, *counts])) <= REQUESTS_PER_TURN
    assert started.count("busy") == 100


def test_the_turns_of_requests_start_again_after_a_pause():
    async def start_twice():
        turns = RequestTurns()
        for _ in range(2):
            await asyncio.gather(*[turns.wait("address") for _ in range(2 * REQUESTS_PER_TURN)])
            await asyncio.sleep(0.01)
        return True

    assert asyncio.run(start_twice())


def test_connections_whose_clients_do_not_read_are_limited(serve, monkeypatch):
    monkeypatch.setattr(connection_limits, "MAX_UNREAD", 2)
    body = b'{"model": "m", "input": "a"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with HostileServer() as upstream:
        upstream.reply = http(b"x" * (15 << 20))
        address, _ = serve(upstream=False, gate="never", options={"upstream": f"{upstream.url}/v1"})
        with connect(address) as first, connect(address) as second, connect(address) as third:
            for client in (first, second, third):
                client.sendall(head % len(body) + body)
                assert client.recv(12) == b"HTTP/1.1 200"
                time.sleep(0.5)  # until it is clear that the client does not read
            sizes = [len(read_all(client)) for client in (first, second, third)]
            assert sizes[0] < 15 << 20 < min(sizes[1:])  # the one that has not read for longest is closed
            with connect(address) as fourth:  # there is room again
                fourth.sendall(head % len(body) + body)
                time.sleep(0.5)
                assert len(read_all(fourth)) > 15 << 20


def test_many_connections_are_accepted_in_one_turn_of_the_event_loop():
    """uvloop accepts one connection in each turn, so a busy client would keep out others."""
    assert build_uvicorn_options(ServeOptions())["loop"] == "asyncio"


def test_a_response_to_a_client_that_has_left_logs_no_error(serve, monkeypatch, caplog):
    """Of two requests on a connection, uvicorn marks only the latest as disconnected, and writes for the other one."""

    async def respond_too_late(self, scope, receive, send):
        scope["extensions"][ABORT_EXTENSION]["abort"]()
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        responses.append("sent")

    responses = []
    address, _ = serve(gate="never")
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    monkeypatch.setattr(EndpointApp, "__call__", respond_too_late)
    for count in (1, 2, 3):
        with connect(address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
            until(lambda count=count: len(responses) == count or caplog.records)
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_large_response_is_in_progress_until_its_client_reads_it_or_its_time_is_over(serve, monkeypatch, reads):
    async def respond(*_):
        return Response(content)

    content = b"x" * (16 << 20)
    monkeypatch.setattr(UpstreamForwarder, "pass_through", respond)
    monkeypatch.setattr(connection_limits, "WRITE_SECONDS", 60.0 if reads else 1.0)
    address, app = serve(gate="never")
    requests = app.state.service.active_requests
    body = b'{"model": "m", "input": "a"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with connect(address) as connection:
        connection.sendall(head % len(body) + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        time.sleep(0.3)
        assert requests.count == 1
        if reads:
            assert read_all(connection).endswith(b"\r\n\r\n" + content)
        until(lambda: requests.count == 0)


@pytest.mark.parametrize("places", ["large_responses", "huge_responses"])
def test_a_large_response_waits_for_a_place_until_an_earlier_one_is_read(serve, places):
    """Otherwise clients that do not read could fill the memory with responses."""
    body = b'{"model": "m", "input": "a"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with HostileServer() as upstream:
        upstream.reply = http(b"x" * (15 << 20))
        address, app = serve(upstream=False, gate="never", options={"upstream": f"{upstream.url}/v1"})
        setattr(app.state.service.forwarder.upstream, places, FairLock(1))
        with connect(address) as first, connect(address) as second:
            first.sendall(head % len(body) + body)
            assert first.recv(12) == b"HTTP/1.1 200"
            second.sendall(head % len(body) + body)
            second.settimeout(0.5)
            with pytest.raises(TimeoutError):
                second.recv(12)
            second.settimeout(10)
            read_all(first)
            assert read_all(second).startswith(b"HTTP/1.1 200")


class CountingLock(FairLock):
    count = 0

    async def acquire(self):
        self.count += 1
        await super().acquire()


def test_each_request_with_large_drafts_takes_one_place(serve):
    """A parsed draft takes ten times the memory of its text. A second response waits for no second place."""
    answer = {"message": {"role": "assistant", "content": "word " * 300_000}, "finish_reason": "stop"}
    with HostileServer() as upstream:
        upstream.reply = http({"choices": [{"index": 0, **answer}]})
        address, app = serve(upstream=False, gate="logprob:mean", options={"upstream": f"{upstream.url}/v1"})
        places = app.state.service.forwarder.upstream.large_responses = CountingLock(2)
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda number: ask(address, f"Who is number {number}?"), range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert len(upstream.seen) > places.count == 4
        until(lambda: places._free_places == 2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_draft_with_many_values_takes_a_place_though_its_text_is_short(serve, stream):
    """An empty object has two characters, but takes 64 bytes of memory."""
    values = [{}] * 200_000  # 0.8 MB
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "delta" if stream else "message": {"role": "assistant", "content": "a"},
    }
    with HostileServer() as upstream:
        content = json.dumps({"choices": [choice], "extra": values}).encode()
        kind = "text/event-stream" if stream else "application/json"
        upstream.reply = http(b"data: " + content + b"\n\ndata: [DONE]\n\n" if stream else content, content_type=kind)
        address, app = serve(upstream=False, gate="logprob:mean", options={"upstream": f"{upstream.url}/v1"})
        places = app.state.service.forwarder.upstream.large_responses = CountingLock(2)
        assert ask(address, stream=stream).status_code == 200
        assert places.count == 1
        until(lambda: places._free_places == 2)


def test_a_streamed_draft_of_6000_tokens_needs_no_place_among_the_huge_responses(serve):
    """With log-probabilities it takes 15 MB of memory. There are only four places for huge responses."""
    token = {"token": " word", "logprob": -0.123456, "bytes": [32, 119, 111, 114, 100]}
    logprobs = {"content": [{**token, "top_logprobs": [token, token]}], "refusal": None}
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": logprobs, "finish_reason": None}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    end = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    with HostileServer() as upstream:
        events = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        last = b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n"
        upstream.reply = http(events * 6_000 + last, content_type="text/event-stream")
        options, change = {"upstream": f"{upstream.url}/v1"}, use_arbiter(FixedArbiter(0.9))  # it reads whole drafts
        address, app = serve(upstream=False, gate="always", options=options, change=change)
        client = app.state.service.forwarder.upstream
        client.large_responses, client.huge_responses = CountingLock(2), CountingLock(2)
        assert ask(address, stream=True).status_code == 200
        assert (client.large_responses.count, client.huge_responses.count) == (1, 0)


def test_the_part_of_a_stream_that_is_forwarded_on_arrival_needs_no_place(serve):
    """Otherwise a few long answers, which take no memory, would stop all others in the middle."""
    piece = {"index": 0, "delta": {"content": "word " * 200}, "finish_reason": None}
    token = {"token": "word", "logprob": -0.01, "bytes": None, "top_logprobs": []}
    first = b"data: %s\n\n" % json.dumps({"choices": [{**piece, "logprobs": {"content": [token]}}]}).encode()
    events = b"data: %s\n\n" % json.dumps({"choices": [piece]}).encode() * 5_000  # 5 MB
    with HostileServer() as upstream:
        upstream.reply = http(first + events + b"data: [DONE]\n\n", content_type="text/event-stream")
        address, app = serve(upstream=False, gate="logprob:first", options={"upstream": f"{upstream.url}/v1"})
        places = app.state.service.forwarder.upstream.large_responses = CountingLock(2)
        assert len(ask(address, stream=True).content) > 5_000_000
        assert places.count == 0


@pytest.mark.parametrize(("size", "count"), [(200_000, 0), (300_000, 1)])
def test_a_stream_with_large_events_needs_a_place(serve, size, count):
    """Each client that does not read has such an event in memory several times."""
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * size}}]}).encode() + b"\n\n"
    with HostileServer() as upstream:
        upstream.reply = http(event * 3 + b"data: [DONE]\n\n", content_type="text/event-stream")
        address, app = serve(upstream=False, gate="never", options={"upstream": f"{upstream.url}/v1"})
        client = app.state.service.forwarder.upstream
        client.large_responses, client.huge_responses = CountingLock(2), CountingLock(2)
        assert len(ask(address, stream=True).content) > 3 * size
        assert (client.large_responses.count, client.huge_responses.count) == (count, 0)


def test_a_login_in_a_trailer_does_not_count(serve, tmp_path):
    key = add_key(tmp_path / "keys.json", "alice")
    address, _ = serve(gate="never", options={"keys": str(tmp_path / "keys.json")})
    body = b'{"question": "What?"}'
    head = b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    login = b"Authorization: Bearer " + key.encode() + b"\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    for request, status in ((head + b"\r\n" + chunks + login, b"401"), (head + login + b"\r\n" + chunks, b"200")):
        with connect(address) as connection:
            connection.sendall(request + b"\r\n")
            assert read_all(connection).split()[1] == status
