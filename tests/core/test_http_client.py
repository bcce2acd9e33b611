"""The door for servers: what ends, what is read, what is hidden."""

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from knowgate.core import http_client
from knowgate.core.http_client import (
    LARGE_RESPONSE_BYTES,
    MAX_RESPONSE_VALUES,
    JsonClient,
    RetryableError,
    RetryPolicy,
    call_with_retries,
    open_client,
    parse_json_response,
    read_response,
    wait_for_turn,
)
from knowgate.core.network_deadline import REQUEST_DEADLINE, request_deadline
from knowgate.core.redaction import MAX_MESSAGE_CHARS, find_url_secrets, redact_message, redact_urls
from knowgate.core.stop_flag import StopError, open_stoppable_context
from knowgate.errors import BadSetting, RejectionError, ServerError
from tests.support.hostile_server import HostileServer, bomb, dripping, endless, http
from tests.support.processes import until

NO_END = 60  # seconds that each single read may take; the request as a whole ends far sooner


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with HostileServer() as running:
        yield running


def read(server, seconds=20.0):
    with (
        open_client({}) as client,
        request_deadline(time.monotonic() + seconds),
        client.stream("GET", server.url, timeout=NO_END) as response,
    ):
        return read_response(response, "the server")


def test_a_response_is_read_completely(server):
    server.reply = http(b"fine", 429, retry_after="7")
    reply = read(server)
    assert (reply.status, reply.content, reply.retry_after, reply.is_success) == (429, b"fine", 7.0, False)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500, http(b" " * 500)])
def test_a_slow_response_ends_at_the_deadline_though_each_read_is_fast(server, head):
    server.reply = dripping(head)
    start = time.monotonic()
    with pytest.raises(Exception, match=r"deadline|timed out|too slowly"):
        read(server, seconds=0.3)
    assert time.monotonic() - start < 9  # the whole response takes at least ten seconds


def test_no_retry_is_waited_for_beyond_the_deadline_of_the_request():
    pauses, deadlines = [], []

    def fail(deadline):
        deadlines.append(deadline)
        raise RetryableError(ServerError("busy"), wait=30.0)

    end = time.monotonic() + 20
    policy = RetryPolicy(total=60.0, sleep=pauses.append)
    with request_deadline(end), pytest.raises(ServerError, match="busy"):
        call_with_retries(fail, policy)
    assert (pauses, deadlines) == ([], [end])


def test_threads_of_a_client_keep_the_deadline_of_the_request():
    client = JsonClient("http://search.test", "the server")
    with request_deadline(5.0):
        assert client.map(lambda item: (item, REQUEST_DEADLINE.get()), [1, 2]) == [(1, 5.0), (2, 5.0)]


@pytest.mark.parametrize("kind", ["endless", "bomb"])
def test_endless_input_takes_bounded_memory(server, kind):
    packed = http(bomb(), content_encoding="gzip")
    server.reply = endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536) if kind == "endless" else packed
    tracemalloc.start()
    try:
        with pytest.raises(ServerError, match="more than 16,777,216 bytes"):
            read(server)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20  # a chunk of 64 KB can expand to 64 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd", "nonsense"])
def test_an_encoding_that_was_not_requested_is_rejected(server, encoding):
    server.reply = http(b"x", content_encoding=encoding)
    with pytest.raises(ServerError, match="not requested"):
        read(server)


@pytest.mark.parametrize("proxy", ["socks9://x", "http://[::1", "http://user:hunter22@x:notaport", "nonsense://"])
def test_an_unusable_proxy_is_reported_without_its_password(monkeypatch, proxy):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(BadSetting, match="HTTPS_PROXY") as caught:
        open_client({})
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"NaN", b"[1e999]", b"9" * 5000, b"[" * 900 + b"]" * 900])
def test_invalid_json_of_a_server_is_an_error_of_this_request(content):
    with pytest.raises(RejectionError, match="the reply"):
        parse_json_response(content, "the reply")


def test_a_response_of_many_values_is_rejected_before_it_is_parsed():
    content = b"[" + b"[]," * (MAX_RESPONSE_VALUES // 2) + b"[]]"
    with pytest.raises(RejectionError, match="the reply has more than 1,000,000 JSON values"):
        parse_json_response(content, "the reply")
    assert parse_json_response(b'["%s"]' % content, "the reply") == [content.decode()]  # one text


@pytest.mark.parametrize(("size", "most"), [(10, 4), (LARGE_RESPONSE_BYTES, 1)])
def test_large_responses_are_parsed_one_at_a_time(monkeypatch, size, most):
    def parse(*args, **options):
        running.append(1)
        time.sleep(0.05)
        counts.append(len(running))
        running.pop()

    running, counts = [], []
    monkeypatch.setattr(http_client, "parse_json", parse)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: parse_json_response(b" " * size + b"[]", "the reply"), range(4)))
    assert max(counts) == most


def test_a_read_ends_if_nobody_waits_for_the_result_any_more(server):
    server.reply = dripping(http({"text": "x" * 50}), pause=3.0)
    with ThreadPoolExecutor(1) as pool:
        with open_stoppable_context() as context:
            reading = pool.submit(context.run, read, server, NO_END)
            until(lambda: server.seen)
        start = time.monotonic()
        with pytest.raises(StopError):
            reading.result(NO_END)
        assert time.monotonic() - start < 3.0  # before the next byte


def test_a_request_whose_time_is_over_stops_to_wait_for_other_large_responses():
    def wait_in_vain():
        with request_deadline(time.monotonic() + 0.2), pytest.raises(ServerError, match="not processed in time"):
            parse_json_response(large, "the reply")

    large = b" " * LARGE_RESPONSE_BYTES + b"[]"
    with ThreadPoolExecutor(1) as pool:
        with wait_for_turn(large):
            pool.submit(wait_in_vain).result(timeout=20)
        assert pool.submit(parse_json_response, large, "the reply").result(timeout=20) == []


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (rb'{"a": ["cut \ud83d", 1.5], "\uDC00": "\ud83d\ude00"}', {"a": ["cut \ufffd", 1.5], "\ufffd": "😀"}),
        (rb'"the text \\ud800"', r"the text \ud800"),
        (b'"caf\xe9"', "caf\ufffd"),
    ],
)
def test_text_of_a_server_that_is_not_unicode_gets_replacement_characters(content, value):
    assert parse_json_response(content, "the reply") == value


def test_a_server_message_becomes_one_short_line_without_secrets():
    assert redact_message("a\r\n b\tsk-1 ", ["sk-1"]) == "a b ***"
    assert len(redact_message("x" * 10**6)) == MAX_MESSAGE_CHARS + 1


def test_logins_and_parameters_are_secrets_in_both_their_forms():
    url = "https://me:p%40ss@x.test/find?api_key=k-123&q={query}"
    assert set(find_url_secrets(url)) == {"p%40ss", "k-123", "p@ss"}
    assert redact_urls(f"knowgate ask --index {url} x") == "knowgate ask --index https://***@x.test/find?*** x"


def test_a_secret_that_contains_another_one_is_removed_completely():
    secrets = find_url_secrets("https://app:app-k123@x.test/find?token=app-k123-4567")
    assert redact_message("app-k123-4567 and app-k123 of app are wrong", secrets) == "*** and *** of *** are wrong"


def test_a_plain_address_is_shown_as_it_is():
    assert redact_urls("see http://x.test/find, then") == "see http://x.test/find, then"
