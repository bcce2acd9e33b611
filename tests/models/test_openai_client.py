import json
import socket
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import BadSetting, ModelError, ServerError
from knowgate.models.openai.client import ApiClient
from knowgate.models.openai.model import OpenAIModel
from knowgate.types import Prompt

GOOD = (200, {}, {"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("KNOWGATE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")


class Pauses(list):
    """A sleep function that only records the pauses."""

    def __call__(self, seconds):
        self.append(seconds)


@contextmanager
def loopback(*answers, drip=0.0):
    """A real local server that sends `answers` in turn, and then the last one again and again."""
    turn = iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, value = answers[min(next(turn), len(answers) - 1)]
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self._write(body)
            self.close_connection = "Content-Length" in headers

        def _write(self, body):
            try:
                for byte in body if drip else ():
                    self.wfile.write(bytes([byte]))
                    time.sleep(drip)
                self.wfile.write(b"" if drip else body)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def post_to(url, **patience):
    settings = {"timeout": 120.0, "total": 360.0, "retries": 2, "backoff": 0.0, **patience}
    client = ApiClient(url, retry=RetryPolicy(**settings), connections=2)
    try:
        yield lambda: client.post("/chat/completions", {"question": "a secret question"})
    finally:
        client.close()


def test_a_refused_connection_names_the_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        pauses = Pauses()
        with post_to(url, sleep=pauses) as post, pytest.raises(ServerError, match="Check that the server runs") as e:
            post()
    assert url in str(e.value)
    assert len(pauses) == 2


def test_a_model_works_over_a_real_connection():
    with loopback(GOOD) as url:
        model = OpenAIModel("m", url)
        rows = model.generate([Prompt(f"q{i}") for i in range(5)], max_tokens=3)
        model.close()
    assert [row[0].text for row in rows] == ["fine"] * 5


def test_a_request_is_repeated_after_status_429():
    pauses = Pauses()
    busy = (429, {"Retry-After": "3"}, {"error": {"message": "slow down"}})
    with loopback(busy, (503, {}, b"busy"), GOOD) as url, post_to(url, backoff=0.4, sleep=pauses) as post:
        assert post() == GOOD[2]
    assert pauses[0] == 3.0
    assert 0.4 <= pauses[1] <= 0.8  # 0.4 * 2, with jitter from half to whole


def test_the_last_error_is_raised_after_all_retries():
    with (
        loopback((429, {}, {"error": {"message": "slow\ndown"}})) as url,
        post_to(url) as post,
        pytest.raises(ServerError, match="answered 429: slow down"),
    ):
        post()


def test_a_retry_after_beyond_the_deadline_is_an_error_at_once():
    pauses = Pauses()
    with (
        loopback((429, {"Retry-After": "3600"}, {})) as url,
        post_to(url, sleep=pauses) as post,
        pytest.raises(ServerError, match="429"),
    ):
        post()
    assert pauses == []


def test_retry_after_may_be_a_date():
    pauses = Pauses()
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=4), usegmt=True)
    with loopback((503, {"Retry-After": date}, {}), GOOD) as url, post_to(url, sleep=pauses) as post:
        post()
    assert 2 < pauses[0] <= 4


@pytest.mark.parametrize("header", ["nan", "inf", "soon", ""])
def test_an_invalid_retry_after_falls_back_to_the_backoff(header):
    pauses = Pauses()
    with loopback((503, {"Retry-After": header}, {}), GOOD) as url, post_to(url, sleep=pauses) as post:
        post()
    assert pauses == [0.0]


def test_a_silent_server_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        pauses = Pauses()
        with (
            post_to(url, timeout=0.2, sleep=pauses) as post,
            pytest.raises(ServerError, match=r"did not answer within 0\.2 s"),
        ):
            post()
    assert pauses == []


def test_a_response_that_comes_too_slowly_is_a_timeout():
    endless = (200, {}, b" " * 1_000_000)
    with (
        loopback(endless, drip=0.01) as url,
        post_to(url, timeout=0.2) as post,
        pytest.raises(ServerError, match="did not answer within"),
    ):
        post()


@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe{", b"[" * 100_000, b""])
def test_a_response_that_is_not_json_is_an_error(body):
    with (
        loopback((200, {}, body)) as url,
        post_to(url) as post,
        pytest.raises(ModelError, match=r"not valid JSON|nested"),
    ):
        post()


def test_a_closed_connection_is_retried():
    with loopback((200, {"Content-Length": "9"}, b"{}"), GOOD) as url, post_to(url) as post:
        assert post() == GOOD[2]


def test_a_response_that_cannot_be_decompressed_is_an_error():
    with (
        loopback((200, {"Content-Encoding": "gzip"}, b"not gzip")) as url,
        post_to(url) as post,
        pytest.raises(ModelError, match="decompressed"),
    ):
        post()


def test_a_redirect_is_not_followed():
    with (
        loopback((307, {"Location": "http://elsewhere.test/"}, b"")) as url,
        post_to(url) as post,
        pytest.raises(ServerError, match="307"),
    ):
        post()


def answering(status, value, **settings):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=value))
    return ApiClient("http://x.test/v1", retry=RetryPolicy(retries=0), connections=1, transport=transport, **settings)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_names_its_variable_and_never_the_key(monkeypatch, status):
    client = answering(status, {"error": {"message": "Incorrect API key provided: sk-12345"}})
    with pytest.raises(ServerError, match=r"requires an API key .*Set the environment variable KNOWGATE_API_KEY"):
        client.get("/models")
    for name in ("OPENAI_API_KEY", "KNOWGATE_API_KEY"):
        monkeypatch.setenv(name, "sk-12345")
        with pytest.raises(ServerError, match=f"refused the API key in the environment variable {name}") as caught:
            client.get("/models")
        assert "12345" not in str(caught.value)


def test_a_key_in_the_message_of_the_server_is_redacted(monkeypatch):
    monkeypatch.setenv("KNOWGATE_API_KEY", "sk-12345")
    with pytest.raises(ServerError, match=r"bad header \*\*\*"):
        answering(400, {"detail": "bad header sk-12345"}).get("/models")


@pytest.mark.parametrize("key", ["sk-é", "sk\n1"])
def test_a_key_with_invalid_characters_is_refused_without_showing_it(monkeypatch, key):
    monkeypatch.setenv("KNOWGATE_API_KEY", key)
    with pytest.raises(BadSetting, match="KNOWGATE_API_KEY") as caught:
        answering(200, {}).get("/models")
    assert key not in str(caught.value)


def test_the_key_is_sent_as_a_bearer_token(monkeypatch):
    seen = []
    monkeypatch.setenv("OPENAI_API_KEY", " sk-1 ")
    transport = httpx.MockTransport(lambda request: seen.append(request) or httpx.Response(200, json={}))
    ApiClient("http://x.test", retry=RetryPolicy(), connections=1, transport=transport).get("/models")
    assert seen[0].headers["Authorization"] == "Bearer sk-1"


def test_a_lone_surrogate_can_be_sent():
    assert answering(200, {"a": 1}).post("/x", {"text": "\ud800"}) == {"a": 1}


def test_long_messages_of_a_server_are_shortened():
    with pytest.raises(ServerError) as caught:
        answering(400, {"error": "x" * 5000}).get("/models")
    assert len(str(caught.value)) < 400
