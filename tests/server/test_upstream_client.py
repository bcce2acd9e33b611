"""The client of the upstream: its URL and its timeouts."""

import socket
import threading

import pytest
from starlette.datastructures import Headers

import knowgate as kg
from knowgate.server.options import ServeOptions
from knowgate.server.upstream.client import UpstreamClient
from tests.server.test_chat import ask


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
