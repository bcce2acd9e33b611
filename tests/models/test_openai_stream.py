"""Streams of an OpenAI-compatible server join to the unstreamed response."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import ModelError, ServerError
from knowgate.models.openai.client import parse_events
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.responses import StreamedResponse
from knowgate.types import Prompt, SignalRequest
from tests.support.chat_server import ChatServer, EventStream, as_line

URL = "http://server.test/v1"
QUICK = RetryPolicy(timeout=120, total=360, retries=2, backoff=0.0)
ASKED = Prompt("why is it so?")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("KNOWGATE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def connect(server):
    return OpenAIModel("m", URL, retry=QUICK, transport=httpx.MockTransport(server))


def run(stream):
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


class Sending(ChatServer):
    """A model on a server without log-probabilities that streams these bytes."""

    def __init__(self, *pieces):
        super().__init__(refuses=frozenset({"logprobs"}))
        self.sent = pieces

    def streamed(self, reply, counts):
        self.stream = EventStream(list(self.sent))
        return self.stream


def delta(text, **more):
    return as_line({"choices": [{"index": 0, "delta": {"content": text}, **more}]})


DONE = b"data: [DONE]\n\n"
STOP = delta("", finish_reason="stop")


def completed(*pieces):
    return run(connect(Sending(*pieces)).stream(ASKED, max_tokens=8))


# --- the same as at once --------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("refuses", [(), ("logprobs",), ("logprobs", "stream_options")])
def test_a_stream_yields_words_and_returns_the_completion(raw, refuses):
    prompt, server = Prompt("why is it so?", raw=raw), ChatServer(refuses=frozenset(refuses))
    pieces, completion = run(connect(server).stream(prompt, max_tokens=8))
    whole = connect(server).generate([prompt], max_tokens=8)[0][0]
    assert pieces == (
        ["why", " is", " it", " so?", " goes", " on"] if raw else ["answer", " to", " why", " is", " it", " so?"]
    )
    assert (completion.text, completion.tokens, completion.finished) == (whole.text, whole.tokens, whole.finished)
    assert completion.n_tokens == (0 if "stream_options" in refuses else whole.n_tokens)


def test_the_token_count_is_requested_only_if_needed():
    with_logprobs, without = ChatServer(), ChatServer(refuses=frozenset({"logprobs"}))
    for server in (with_logprobs, without):
        run(connect(server).stream(ASKED, max_tokens=8))
    assert "stream_options" not in with_logprobs.after_probe()[0]
    assert without.after_probe()[-1]["stream_options"] == {"include_usage": True}


def test_an_unstreamed_response_is_one_piece():
    pieces, completion = run(connect(ChatServer(ignores=frozenset({"stream"}))).stream(ASKED, max_tokens=8))
    assert pieces == ["answer to why is it so?"] == [completion.text]


def test_an_answer_that_hit_the_limit_is_not_finished():
    assert not completed(delta("so"), delta("", finish_reason="length"), DONE)[1].finished


def test_a_finished_draft_needs_no_request():
    server = ChatServer()
    model = connect(server)
    handle = model.read([ASKED], SignalRequest(draft_tokens=8))[0].resume
    asked = len(server.bodies)
    assert run(model.stream(ASKED, max_tokens=8, resume=handle))[0] == ["answer to why is it so?"]
    assert len(server.bodies) == asked


def test_an_unfinished_draft_is_streamed_again():
    server = ChatServer()
    server.finish = "length"
    model = connect(server)
    handle = model.read([ASKED], SignalRequest(draft_tokens=1))[0].resume
    pieces, _ = run(model.stream(ASKED, max_tokens=8, resume=handle))
    assert len(pieces) == 6
    assert server.after_probe()[-1]["max_tokens"] == 8


# --- what servers send ----------------------------------------------------------------------------


def test_comments_other_fields_and_empty_chunks_are_ignored():
    noise = [b": ping\n\n", b"event: message\nid: 7\nretry: 10\n\n", b"data:\n\n", b'data: {"choices": []}\n\n']
    pieces, _ = completed(
        noise[0], as_line({"choices": [{"delta": {"role": "assistant"}}]}), *noise, delta("so"), STOP, DONE
    )
    assert pieces == ["so"]


def test_chunks_may_be_split_anywhere_even_inside_a_character():
    whole = delta("巴黎") + delta(" é🙂") + STOP + DONE
    pieces, completion = completed(*(bytes([byte]) for byte in whole))
    assert pieces == ["巴黎", " é🙂"]
    assert completion.text == "巴黎 é🙂"


def test_unicode_line_ends_are_text():
    assert completed(delta("a\u2028b\x85c"), STOP, DONE)[0] == ["a\u2028b\x85c"]


def test_lines_may_end_in_crlf_without_a_blank_line():
    parts = [delta("a"), delta("b"), STOP, DONE]
    assert completed(*(part.replace(b"\n\n", b"\r\n") for part in parts))[0] == ["a", "b"]


def test_data_after_the_end_is_ignored():
    assert completed(delta("a"), DONE, delta("b"))[0] == ["a"]


def test_a_finish_reason_ends_a_stream_without_an_end_mark():
    assert completed(delta("a"), STOP)[1].text == "a"


def test_the_last_token_count_is_used_and_may_be_missing():
    count = as_line({"choices": [], "usage": {"completion_tokens": 7}})
    assert completed(delta("a"), STOP, count, DONE)[1].n_tokens == 7
    assert completed(delta("a"), STOP, DONE)[1].n_tokens == 0


def test_events_are_lines_of_data():
    assert list(parse_events([b": x\nda", b"ta: 1\n\ndata:2\nother: 3\ndata: [DO", b"NE]"])) == ["1", "2", "[DONE]"]


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (
            as_line({"error": {"message": "out of memory"}}),
            "reported an error in the middle of its answer: out of memory",
        ),
        (as_line({"error": "quota exceeded"}), "reported an error in the middle of its answer: quota exceeded"),
        (b"", "closed the connection in the middle of its answer"),
    ],
)
def test_a_failure_in_the_middle_is_raised_after_the_pieces_so_far(last, message):
    server = Sending(delta("so"), last)
    stream = connect(server).stream(ASKED, max_tokens=8)
    assert next(stream) == "so"
    with pytest.raises(ServerError, match=message):
        next(stream)
    assert server.stream.closed


@pytest.mark.parametrize(
    "part", [b"data: {nonsense\n\n", b"data: 5\n\n", as_line({"choices": [{"delta": {"content": 5}}]})]
)
def test_a_malformed_chunk_is_an_error(part):
    with pytest.raises(ModelError, match=r"not valid JSON|not a JSON object|without answer text"):
        completed(delta("so"), part, DONE)


def test_a_broken_stream_is_not_retried():
    class Breaking(Sending):
        def streamed(self, reply, counts):
            stream = super().streamed(reply, counts)
            stream.pieces = failing(self.sent)
            return stream

    def failing(pieces):
        yield from pieces
        raise httpx.RemoteProtocolError("peer closed connection")

    server = Breaking(delta("so"))
    stream = connect(server).stream(ASKED, max_tokens=8)
    assert next(stream) == "so"
    with pytest.raises(
        ServerError, match=r"closed the connection in the middle of its answer \(peer closed connection\)"
    ):
        next(stream)
    assert sum("stream" in body for body in server.after_probe()) == 1


def test_opening_a_stream_is_retried():
    server, busy = ChatServer(), [429, 503]

    def sometimes(request):
        if "stream" in json.loads(request.content) and busy:
            return httpx.Response(busy.pop(), json={"error": {"message": "busy"}})
        return server(request)

    assert run(connect(sometimes).stream(ASKED, max_tokens=8))[0][0] == "answer"
    assert busy == []


def test_a_refusal_contains_the_message_of_the_server():
    def refusing(request):
        body = json.loads(request.content)
        if body.get("stream"):
            return httpx.Response(400, json={"error": {"message": "the prompt is too long"}})
        return ChatServer()(request)

    with pytest.raises(ServerError, match="answered 400: the prompt is too long"):
        next(connect(refusing).stream(ASKED, max_tokens=8))


# --- stopping -------------------------------------------------------------------------------------


def test_closing_the_stream_closes_the_connection():
    server = Sending(*[delta(f"w{number}") for number in range(50)], STOP, DONE)
    stream = connect(server).stream(ASKED, max_tokens=99)
    assert next(stream) == "w0"
    stream.close()
    assert server.stream.closed
    assert server.stream.taken < 5


def test_pieces_arrive_over_a_real_connection_before_the_answer_is_complete():
    heard = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            if not body.get("stream"):
                plain = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
                self.wfile.write(json.dumps(plain).encode())
                return
            self.wfile.write(delta("first"))
            self.wfile.flush()
            if heard.wait(60):  # the rest is only sent once the first piece has been seen
                self.wfile.write(delta(" second") + STOP + DONE)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    model = OpenAIModel("m", f"http://127.0.0.1:{server.server_port}/v1")
    try:
        stream = model.stream(ASKED, max_tokens=8)
        assert next(stream) == "first"
        heard.set()
        assert run(stream)[0] == [" second"]
    finally:
        heard.set()
        model.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_chunks_of_other_choices_are_ignored():
    part = {"choices": [{"index": 1, "delta": {"content": "B"}}, {"index": 0, "delta": {"content": "A"}}]}
    other = {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": "length"}]}
    reply = StreamedResponse()
    assert [reply.add(one) for one in (part, other, "[DONE]")] == ["A", "", ""]
    assert reply.finish_reason is None


def test_a_long_line_in_small_chunks_takes_linear_time():
    start = time.process_time()
    assert list(parse_events(b"x" for _ in range(300_000))) == []
    assert time.process_time() - start < 5  # joined again for every piece it takes minutes
