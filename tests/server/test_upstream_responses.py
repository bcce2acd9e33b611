"""Responses of the upstream are limited in size, nesting and time. Invalid ones end in an error, never in a cut stream."""

import asyncio
import functools
import gc
import gzip
import itertools
import json
import socket
import threading
import time
import weakref

import httpx
import pytest

from knowgate.models.fair_executor import CLIENT
from knowgate.server import streaming
from knowgate.server.chat.gate_service import GateService
from knowgate.server.json_api import LARGE_BODY_BYTES
from knowgate.server.upstream import draft, response_body
from knowgate.server.upstream.client import UpstreamClient
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.support.hostile_server import HostileServer, endless, http
from tests.support.processes import PATIENCE, until

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
DEEP = b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEP_LOGPROBS = b'{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":' + b"[" * 900 + b"]" * 900 + b"}]}"
DRAFT_GATES = ["never", "logprob:mean", "logprob:first"]


def chunk(text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}).encode()


@pytest.fixture
def hostile():
    with HostileServer() as server:
        yield server


@pytest.fixture
def serve_hostile(serve, hostile):
    def start(gate="never", **options):
        return serve(upstream=False, gate=gate, options={"upstream": f"{hostile.url}/v1", **options})[0]

    return start


def read_stream(address):
    """Return the data of all events. A cut stream raises an error of httpx."""
    response = ask(address, stream=True)
    text = response.text.replace("\r\n", "\n").replace("\r", "\n")
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("gate", DRAFT_GATES)
@pytest.mark.parametrize(
    "data", [DEEP, DEEP_LOGPROBS, b'{"choices":5}', b'{"choices": {"a": 1}}'], ids=lambda d: d[:14]
)
@pytest.mark.parametrize("position", ["first", "later"])
def test_odd_chunks_end_in_an_error_event(serve_hostile, hostile, gate, data, position):
    good = b"data: " + chunk("a") + b"\n\n"
    hostile.reply = STREAM_HEAD + (good if position == "later" else b"") + b"data: " + data + b"\n\n" + good
    address = serve_hostile(gate)
    reply = ask(address, stream=True)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line]
    last = lines[-2] if lines[-1] == "[DONE]" else lines[-1]  # a request without any text is no stream
    assert json.loads(last)["error"]["code"] == "upstream_invalid"


ERROR = b'{"error": {"message": "boom"}}'


@pytest.mark.parametrize("gate", ["always", *DRAFT_GATES])
@pytest.mark.parametrize(
    ("last", "codes"),
    [(chunk("lo"), ["upstream_broke_off"]), (ERROR, [None]), (chunk("", "stop"), []), (chunk("", "length"), [])],
    ids=["cut", "error", "stop", "length"],
)
def test_a_stream_that_the_upstream_does_not_end_has_an_end(serve_hostile, hostile, gate, last, codes):
    hostile.reply = STREAM_HEAD + b"data: " + chunk("Hel") + b"\n\ndata: " + last + b"\n\n"
    *events, end = read_stream(serve_hostile(gate))
    errors = [json.loads(event)["error"] for event in events if "error" in json.loads(event)]
    assert ([error.get("code") for error in errors], end) == (codes, "[DONE]")


def test_an_incomplete_last_event_does_not_run_into_the_error(serve_hostile, hostile):
    hostile.reply = STREAM_HEAD + b"data: " + chunk("Hel")
    events = read_stream(serve_hostile("never"))
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == "Hel"
    assert (json.loads(events[1])["error"]["code"], events[2:]) == ("upstream_broke_off", ["[DONE]"])


def test_an_event_that_is_cut_within_its_json_is_left_out(serve_hostile, hostile):
    hostile.reply = STREAM_HEAD + b"data: " + chunk("Hel") + b"\n\ndata: " + chunk("lo")[:40]
    events = read_stream(serve_hostile("never"))
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == "Hel"
    assert (json.loads(events[1])["error"]["code"], events[2:]) == ("upstream_broke_off", ["[DONE]"])


@pytest.mark.parametrize("gate", DRAFT_GATES)
def test_all_lines_of_a_stream_end_in_a_line_feed(serve_hostile, hostile, gate):
    """Some clients see no end of an event whose lines end in LF and CR LF."""
    data = [chunk("Hel"), chunk("lo"), chunk("", "stop"), b"[DONE]"]
    hostile.reply = STREAM_HEAD + b"".join(b"data: " + item + b"\r\n\r\n" for item in data)
    reply = ask(serve_hostile(gate), stream=True)
    assert b"\r" not in reply.content
    assert reply.content.count(b"\n\n") == len(data)


REFUSAL = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
CALL = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}


def reply_with(message):
    choice = {"index": 0, "message": message, "logprobs": {"content": None}, "finish_reason": "stop"}
    return JSON_HEAD + json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def item(token, logprob, values=None):
    return {"token": token, "logprob": logprob, "bytes": values, "top_logprobs": []}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("stream", [True, False])
def test_gates_read_the_answer_and_not_the_reasoning_before_it(serve_hostile, hostile, stream, field):
    thoughts = [item("Nowhere", -0.001), item(".", -0.001), item("</think>", -0.001), item("\n\n", -0.001)]
    answer = [item(" Now\ufffd", -3.0, [32, 78, 111, 119, 195]), item("\ufffd", -0.1, [169]), item(".", -0.1)]
    if stream:
        deltas = [{field: item["token"]} for item in thoughts] + [{"content": text} for text in ("", "Nowé", ".")]
        choices = [
            {"index": 0, "delta": delta, "finish_reason": None, "logprobs": {"content": [listed]}}
            for delta, listed in zip(deltas, thoughts + answer, strict=True)
        ]
        events = [json.dumps({"choices": [choice]}).encode() for choice in choices] + [chunk("", "stop"), b"[DONE]"]
        hostile.reply = STREAM_HEAD + b"".join(b"data: " + event + b"\n\n" for event in events)
    else:
        message = {"role": "assistant", "content": "Nowé.", field: "Nowhere."}
        logprobs = {"content": [*thoughts, *answer, item("<|im_end|>", -0.001), item("", 0.0)]}
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
        hostile.reply = JSON_HEAD + json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
    headers = ask(serve_hostile("logprob:first"), stream=stream).headers
    assert "the first word of its draft was 5 % certain" in headers["x-knowgate-reason"]


def test_long_thoughts_hardly_count_for_the_limits_of_a_draft(serve_hostile, hostile, monkeypatch):
    monkeypatch.setattr(draft, "MAX_DRAFT_VALUES", 100)
    deltas = [{"reasoning": "Hm. "}] * 200 + [{"content": "Nowhere."}]
    choices = [{"index": 0, "delta": delta, "logprobs": {"content": [item("x", -3.0)]}} for delta in deltas]
    events = [json.dumps({"choices": [choice]}).encode() for choice in choices] + [chunk("", "stop"), b"[DONE]"]
    hostile.reply = STREAM_HEAD + b"".join(b"data: " + event + b"\n\n" for event in events)
    reply = ask(serve_hostile("logprob:first"), stream=True)
    assert (reply.status_code, reply.text.count("Hm. "), "broke_off" in reply.text) == (200, 200, False)


def test_log_probabilities_of_the_reasoning_alone_are_not_read(serve_hostile, hostile):
    message = {"role": "assistant", "content": "Here.", "reasoning_content": "Nowhere."}
    choice = {"index": 0, "message": message, "logprobs": {"content": [item("Nowhere", -0.1), item(".", -0.1)]}}
    hostile.reply = JSON_HEAD + json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
    report = ask(serve_hostile("logprob:first")).json()["knowgate"]
    assert (report["retrieve"], report["degraded"]) == (True, ["gate"])


def test_a_draft_without_text_retrieves_and_is_no_failure_of_the_gate(serve_hostile, hostile):
    hostile.reply = reply_with(REFUSAL)
    report = ask(serve_hostile("logprob:mean")).json()["knowgate"]
    assert (report["retrieve"], report["need"], report["degraded"]) == (True, 1.0, [])
    assert "its answer without passages is empty" in report["reason"]


def test_a_function_call_in_the_format_of_older_llms_is_sent(serve_hostile, hostile):
    hostile.reply = reply_with(CALL)
    reply = ask(serve_hostile("logprob:mean")).json()
    assert (reply["choices"][0]["message"], reply["knowgate"]["why_not"]) == (CALL, "the LLM called a tool")


def test_a_draft_that_is_cut_is_not_complete(serve_hostile, hostile):
    hostile.reply = STREAM_HEAD + b"data: " + chunk("Hel") + b"\n\n"
    chunks = [json.loads(event) for event in read_stream(serve_hostile("logprob:mean"))[:-1]]
    assert [item["choices"][0]["finish_reason"] for item in chunks if "choices" in item] == [None]


def test_a_stream_of_the_responses_api_gets_no_further_event(serve_hostile, hostile):
    hostile.reply = STREAM_HEAD + b'data: {"type": "response.created"}\n\ndata: {"type": "response.completed"}\n\n'
    body = {"model": "m", "input": UNKNOWN, "stream": True}
    reply = httpx.post(f"{serve_hostile('never')}/v1/responses", json=body, timeout=30)
    assert [line[:5] for line in reply.text.split("\n") if line] == ["data:", "data:"]
    assert "DONE" not in reply.text


@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
def test_events_that_end_in_carriage_returns_are_forwarded(serve_hostile, hostile, gate):
    events = [chunk("Pa"), chunk("ris"), chunk("", "stop"), b"[DONE]"]
    hostile.reply = STREAM_HEAD + b"".join(b"data: " + event + b"\r\r" for event in events)
    address = serve_hostile(gate)
    assert "\r" not in ask(address, stream=True).text
    received = read_stream(address)
    assert received[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in received[:-1]]
    assert "".join(texts) == "Paris"
    assert "knowgate" in json.loads(received[0])


def test_the_byte_order_mark_of_a_stream_is_removed(serve_hostile, hostile):
    events = [chunk("Pa"), chunk("ris"), chunk("", "stop"), b"[DONE]"]
    hostile.reply = STREAM_HEAD + b"\xef\xbb\xbf" + b"".join(b"data: " + event + b"\n\n" for event in events)
    first_event = read_stream(serve_hostile("never"))[0]
    assert "knowgate" in json.loads(first_event)


@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
def test_an_event_of_many_json_values_is_an_error(serve_hostile, hostile, gate):
    hostile.reply = STREAM_HEAD + b'data: {"choices":[' + b"[]," * 500_000 + b"[]]}\n\n"
    assert "an event has more than 1,000,000 JSON values" in ask(serve_hostile(gate), stream=True).text


def test_a_streamed_draft_has_a_maximum_number_of_json_values(serve_hostile, hostile, monkeypatch):
    monkeypatch.setattr(draft, "MAX_DRAFT_VALUES", 30)
    hostile.reply = STREAM_HEAD + (b"data: " + chunk("a") + b"\n\n") * 200
    assert "the answer has more than 30 JSON values" in ask(serve_hostile("logprob:mean"), stream=True).text


def test_the_rest_of_a_stream_after_its_draft_may_have_more_json_values(serve_hostile, hostile, monkeypatch):
    monkeypatch.setattr(draft, "MAX_DRAFT_VALUES", 30)
    hostile.reply = STREAM_HEAD + (b"data: " + chunk("a") + b"\n\n") * 200
    assert "JSON values" not in ask(serve_hostile("logprob:first"), stream=True).text


@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
@pytest.mark.parametrize(
    "piece", [(b": " + b"a" * 1020 + b"\n") * 64, b"a" * 65536], ids=["no blank lines", "no lines"]
)
def test_events_without_an_end_take_linear_time_and_end_in_an_error(serve_hostile, hostile, gate, piece):
    hostile.reply = lambda: iter([STREAM_HEAD, *[piece] * 40 * 16])  # 40 MB
    address, start = serve_hostile(gate), time.process_time()  # on a busy machine, waiting takes long
    reply = ask(address, stream=True)
    assert "upstream_invalid" in reply.text
    assert len(reply.text) < 1 << 20
    assert time.process_time() - start < 15  # it took more than twenty seconds for 20 MB


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"2;x=", b"a" * 65536),
        (b"0\r\n", b"x: y\r\n" * 9999),
        (b"", b"1;" + b"a" * 999 + b"\r\n \r\n"),
        (b"", b"1\r\na\r\n" * 9999),
        (b"", b"6\r\n      \r\n" * 6000),
    ],
    ids=["chunk extension", "trailers", "extension of each chunk", "chunks of one byte", "chunks of six bytes"],
)
def test_endless_bytes_besides_the_body_end_in_an_error(serve_hostile, hostile, stream, start, piece):
    kind = b"text/event-stream" if stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: " + kind + b"\r\n\r\n"
    sizes = []

    def reply():
        for part in itertools.islice(endless(head + start, piece)(), 4096):
            sizes.append(len(part))
            yield part

    hostile.reply = reply
    answer = ask(serve_hostile(), stream=stream)
    assert "upstream" in answer.text
    assert sum(sizes) < 40 << 20  # with the buffers of the sockets


@functools.cache
def compress_much():
    """Compress 50 MB."""
    return gzip.compress(b'{"a":"' + b"0" * (50 << 20) + b'"}')


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
def test_a_compressed_response_is_bounded(serve_hostile, hostile, gate, stream):
    hostile.reply = http(compress_much(), content_type="application/json", content_encoding="gzip")
    reply = ask(serve_hostile(gate), stream=stream)
    assert "upstream_invalid" in reply.text
    assert len(reply.content) < 1 << 20


def test_a_small_compressed_response_is_decompressed(serve_hostile, hostile):
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris"}}]}
    data = gzip.compress(json.dumps(answer).encode())
    hostile.reply = http(data, content_type="application/json", content_encoding="gzip")
    reply = ask(serve_hostile())
    assert reply.json()["choices"] == answer["choices"]


@pytest.mark.parametrize("rest", [b"", b"\0\0"], ids=["no rest", "padding"])
def test_gzip_data_may_have_several_members(serve_hostile, hostile, rest):
    content = make_completion()
    data = gzip.compress(content[:9]) + gzip.compress(content[9:]) + rest
    hostile.reply = http(data, content_type="application/json", content_encoding="gzip")
    assert ask(serve_hostile()).json()["choices"][0]["message"]["content"] == "Paris"


@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_of_several_data_lines_is_one_json_object(serve_hostile, hostile, gate, end):
    stream = b""
    for event in (chunk("Pa"), chunk("ris"), chunk("", "stop")):
        lines = json.dumps(json.loads(event), indent=1).encode().split(b"\n")
        stream += b"".join(b"data: " + line + end for line in lines) + end
    hostile.reply = STREAM_HEAD + stream + b"data: [DONE]" + end + end
    *received, done = read_stream(serve_hostile(gate))
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in received]
    assert ("".join(texts), done) == ("Paris", "[DONE]")
    assert "knowgate" in json.loads(received[0])


def test_events_without_blank_lines_between_them_are_not_joined(serve_hostile, hostile):
    events = [chunk("Pa"), chunk("ris"), chunk("", "stop"), b"[DONE]"]
    hostile.reply = STREAM_HEAD + b"".join(b"data: " + event + b"\n" for event in events)
    *received, _ = read_stream(serve_hostile())
    assert [json.loads(event)["choices"][0]["delta"].get("content", "") for event in received] == ["Pa", "ris", ""]


def test_an_event_of_many_data_lines_is_bounded(serve_hostile, hostile, monkeypatch):
    monkeypatch.setattr(streaming, "MAX_EVENT_BYTES", 1000)
    hostile.reply = STREAM_HEAD + b"data: {\n" + b"data: 1,\n" * 1000
    assert "an event of more than 1,000 bytes" in ask(serve_hostile(), stream=True).text


@pytest.mark.parametrize("gate", ["never", "logprob:mean"])
@pytest.mark.parametrize(
    "content",
    [DEEP, b'{"choices":5}', b"[1,2]", b"<html>oops</html>", b"{", b'{"choices":[' + b"1," * 2_000_000 + b"1]}",
     '{"choices": []}'.encode("utf-16"), '{"choices": []}'.encode("utf-16-le")],
    ids=["deep", "choices", "list", "html", "cut", "many values", "UTF-16", "UTF-16 without mark"],
)  # fmt: skip
def test_invalid_plain_responses_are_502(serve_hostile, hostile, gate, content):
    hostile.reply = http(content, content_type="application/json")
    reply = ask(serve_hostile(gate))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_invalid")


def test_a_large_plain_response_is_502(serve_hostile, hostile, monkeypatch):
    hostile.reply = lambda: iter([JSON_HEAD, *[b"a" * 65536] * 1000])
    reply = ask(serve_hostile())
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_invalid")
    assert f"{response_body.MAX_CONTENT_BYTES:,} bytes" in reply.json()["error"]["message"]


def test_headers_that_cannot_be_sent_are_left_out(serve_hostile, hostile):
    answer = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"}}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nx-request-id: \xff\xfea\r\nContent-Length: %d\r\n\r\n"
    hostile.reply = head % len(answer) + answer
    reply = ask(serve_hostile())
    assert reply.status_code == 200
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_that_stops_is_an_error_in_time(serve_hostile, hostile, stream):
    has_reply, held = threading.Event(), []

    def stop_midway():
        yield STREAM_HEAD + b"data: " + chunk("a") + b"\n\n" if stream else JSON_HEAD + b'{"choices":'
        held.append(has_reply.wait(20))

    hostile.reply = stop_midway
    address = serve_hostile(first_byte_seconds=0.3)
    assert "upstream_timeout" in ask(address, stream=stream).text
    assert held == []  # the upstream has not ended its response
    has_reply.set()


@pytest.mark.parametrize("gate", DRAFT_GATES)
def test_a_stream_ends_at_its_last_event(serve_hostile, hostile, gate):
    has_reply, held = threading.Event(), []

    def hold_open():
        yield STREAM_HEAD + b"".join(b"data: " + event + b"\n\n" for event in (chunk("Paris"), chunk("", "stop")))
        yield b"data: [DONE]\n"
        held.append(has_reply.wait(20))
        yield b"\n"

    address = serve_hostile(gate)
    hostile.reply = hold_open
    reply = ask(address, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert "Paris" in reply.text
    assert held == []  # the upstream still holds every stream open
    has_reply.set()


def test_the_connection_of_a_stream_is_used_again(serve, stub):
    address, _ = serve(gate="never")
    for _ in range(3):
        assert ask(address, stream=True).text.endswith("data: [DONE]\n\n")
    assert len(stub.ports) == 1


@pytest.mark.parametrize("gate", DRAFT_GATES)
@pytest.mark.parametrize("body", [b"", b": comment\n\n", b"data: [DONE]\n\n"])
def test_a_stream_without_events_is_an_error(serve_hostile, hostile, gate, body):
    hostile.reply = STREAM_HEAD + body
    reply = ask(serve_hostile(gate), stream=True)
    assert "upstream_invalid" in reply.text
    assert "has no events" in reply.text


def test_a_silent_upstream_times_out_and_opens_its_breaker(serve):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"upstream": f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "first_byte_seconds": 0.2}
        address, _ = serve(upstream=False, gate="never", options=options)
        statuses = [ask(address).status_code for _ in range(6)]
        assert statuses == [504] * 5 + [503]
        readiness = httpx.get(f"{address}/ready")
        assert (readiness.status_code, readiness.json()["breakers"]["upstream"]) == (503, "open")


@pytest.mark.parametrize("stream", [True, False])
def test_an_upstream_that_sends_only_headers_opens_its_breaker(serve_hostile, hostile, stream):
    has_replies = threading.Event()

    def send_headers():
        yield STREAM_HEAD if stream else JSON_HEAD
        has_replies.wait(60)

    hostile.reply = send_headers
    address = serve_hostile(first_byte_seconds=0.2)
    assert all("upstream_timeout" in ask(address, stream=stream).text for _ in range(5))
    assert ask(address, stream=stream).status_code == 503
    has_replies.set()


def make_completion(text="Paris", logprob="-0.1"):
    """Return a completion that is not streamed, with log-probabilities."""
    token = {"token": text, "logprob": 0, "top_logprobs": [{"token": text, "logprob": 0}]}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": [token]}}
    return json.dumps({"choices": [choice]}).replace('"logprob": 0', f'"logprob": {logprob}').encode()


@pytest.mark.parametrize("gate", DRAFT_GATES)
def test_a_response_that_is_not_streamed_is_sent_as_it_is_to_a_client_that_wants_a_stream(serve_hostile, hostile, gate):
    address = serve_hostile(gate)
    hostile.reply = JSON_HEAD + make_completion()
    reply = ask(address, stream=True)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json()["choices"][0]["message"]["content"] == "Paris"


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_valid_json_become_null(serve_hostile, hostile, stream):
    event = chunk("a").replace(b'"id": "c"', b'"id": NaN, "x": -Infinity')
    hostile.reply = (
        STREAM_HEAD + b"data: " + event + b"\n\ndata: [DONE]\n\n"
        if stream
        else JSON_HEAD + make_completion(logprob="NaN")
    )
    text = ask(serve_hostile(), stream=stream, logprobs=True).text
    assert "null" in text
    assert "NaN" not in text
    assert "Infinity" not in text


def test_many_interim_responses_are_an_error(serve_hostile, hostile):
    final = JSON_HEAD + json.dumps({"choices": [{"message": {"role": "assistant", "content": "Yes"}}]}).encode()
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    hostile.reply = interim * 50 + final
    address = serve_hostile()
    assert ask(address).status_code == 200
    hostile.reply = interim * 5_000 + final
    assert ask(address).status_code == 502


def test_errors_of_the_upstream_do_not_show_the_key_of_this_server(serve_hostile, hostile, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-server")
    message = b'{"error": {"message": "Incorrect API key provided: sk-secret-of-the-server"}}'
    hostile.reply = JSON_HEAD.replace(b"200 OK", b"401 Unauthorized") + message
    reply = ask(serve_hostile())
    assert reply.status_code == 401
    assert reply.json()["error"]["message"] == "Incorrect API key provided: ***"


def test_large_responses_are_processed_one_at_a_time_and_keys_take_turns():
    order, at_once, most_at_once = [], 0, 0
    first_runs, go_on = threading.Event(), threading.Event()

    def process(name):
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        order.append(name)
        first_runs.set()
        go_on.wait(PATIENCE)
        at_once -= 1

    async def submit(key):
        CLIENT.set(key)
        await response_body.run_for_size(LARGE_BODY_BYTES + 1, lambda: process(key))

    async def submit_all():
        tasks = [asyncio.create_task(submit("alice")) for _ in range(4)]
        await asyncio.to_thread(first_runs.wait, PATIENCE)
        tasks.append(asyncio.create_task(submit("bob")))
        await asyncio.sleep(0)  # so that bob's response waits, too
        go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(submit_all())
    assert (most_at_once, order[:2], len(order)) == (1, ["alice", "bob"], 5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_probabilities_of_an_endless_answer_are_read_up_to_a_limit(serve_hostile, hostile, monkeypatch, stream):
    monkeypatch.setattr(response_body, "MAX_ANSWER_CHARS", 50)
    counts, decide = [], GateService.decide

    def record(self, rag, question, draft, trace):
        counts.append(len(draft.tokens))
        return decide(self, rag, question, draft, trace)

    monkeypatch.setattr(GateService, "decide", record)
    tokens = [{"token": "x", "logprob": -0.1, "top_logprobs": []}] * 200
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": tokens}}
    body = json.dumps({"choices": [{**choice, "delta" if stream else "message": {"content": "x" * 200}}]}).encode()
    hostile.reply = STREAM_HEAD + b"data: " + body + b"\n\n" if stream else JSON_HEAD + body
    assert ask(serve_hostile("logprob:mean"), stream=stream).status_code == 200
    assert counts == [50]


def test_only_the_last_lines_with_a_usage_are_parsed_again(monkeypatch):
    parsed, parse = [], draft.parse_event_data
    monkeypatch.setattr(draft, "parse_event_data", lambda line: parsed.append(line) or parse(line))
    answer = draft.UpstreamDraft(None, lines=[b'data: {"usage": 1}'] * 10_000)
    assert draft._find_usage(answer) == {}
    assert len(parsed) == draft.MAX_USAGE_LINES


@pytest.mark.parametrize(
    "event",
    [{"type": "response.failed", "response": {"error": {"code": "server_error"}}}, {"type": "error", "code": "x"}],
)
def test_a_failed_response_of_the_responses_api_is_recorded_as_an_error(serve_hostile, hostile, tmp_path, event):
    hostile.reply = STREAM_HEAD + b"data: " + json.dumps(event).encode() + b"\n\n"
    address = serve_hostile("never", decisions=str(tmp_path / "d.db"))
    body = {"model": "m", "input": UNKNOWN, "stream": True}
    id = httpx.post(f"{address}/v1/responses", json=body, timeout=30).headers["x-knowgate-id"]
    assert httpx.get(f"{address}/v1/decisions/{id}").json()["status"] == 502


def test_an_object_that_stays_incomplete_before_many_empty_lines_takes_linear_time(serve_hostile, hostile):
    event = b'data: {"a":[' + b"{}," * 20_000 + b"\n" + b"data:\n" * 2_000 + b"\n"
    hostile.reply = STREAM_HEAD + event + b"data: [DONE]\n\n"
    start = time.monotonic()
    ask(serve_hostile(), stream=True)
    assert time.monotonic() - start < 5


def test_a_response_that_breaks_off_is_no_circular_reference(serve_hostile, hostile, monkeypatch):
    references = []
    record = UpstreamClient.record_body_error

    def keep_reference(self, error, response):
        references.append(weakref.ref(response))
        return record(self, error, response)

    monkeypatch.setattr(UpstreamClient, "record_body_error", keep_reference)
    hostile.reply = JSON_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n") + b"{"
    address = serve_hostile()
    gc.disable()
    try:
        assert ask(address).status_code == 502
        until(lambda: references and references[0]() is None)
    finally:
        gc.enable()
