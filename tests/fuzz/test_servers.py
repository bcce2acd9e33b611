"""Hostile servers: whatever an LLM's, a search engine's or a reranker's says, a sentence or a right result, in time."""

import json
import math

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.http_client import MAX_RETRIES, RetryPolicy, parse_json_response
from knowgate.core.validation import parse_retry_after
from knowgate.models.openai.client import ApiClient, parse_events
from knowgate.models.openai.model import OpenAIModel
from knowgate.retrieval.engines.http import HttpRetriever, parse_search_response
from knowgate.types import LabelPrompt, Passage, Prompt, SignalRequest
from tests.support.chat_server import ChatServer, as_line, parts_of
from tests.support.fuzz import attempt, tries, trying
from tests.support.hostile_replies import (
    BODIES,
    CHAT,
    FOUND,
    HEADERS,
    KEY,
    LOGIN,
    RAW,
    STATUSES,
    WAITS,
    streams,
    texts,
)
from tests.support.hostile_server import HostileServer, bomb, dripping, endless, http

HASTE = RetryPolicy(timeout=0.4, total=0.6, retries=1, backoff=0.001)


def answering(content):
    """A model on a server that answers well when it is probed, and then so."""
    server = ChatServer()

    def reply(request):
        good = server(request)
        is_probe = b'"content": "Hi"' in request.content
        return good if is_probe or request.method == "GET" else httpx.Response(200, content=content)

    return OpenAIModel("m", "http://server.test/v1", retry=HASTE, transport=httpx.MockTransport(reply))


def check_completion(completion):
    assert isinstance(completion.text, str)
    assert isinstance(completion.n_tokens, int)
    assert 0 <= completion.n_tokens < 2**31
    for token in completion.tokens or ():
        assert -1e4 < token.logprob <= 0
        assert token.margin is None or 0 <= token.margin <= 1


def reading(content, raw):
    """Draft, samples and labels of one reply."""
    model = answering(content)
    return model.read([Prompt("q", raw=raw)], SignalRequest(draft_tokens=4))[0].draft


@trying(20, 500)
@given(texts(CHAT) | texts(RAW), st.booleans())
def test_a_damaged_reply_is_refused_or_read_as_it_stands(content, raw):
    outcome = attempt("LLM server", "replies damaged at random", lambda: reading(content, raw))
    if not outcome.refusal:
        check_completion(outcome.value)
        choice = json.loads(content)["choices"][0]
        said = choice["message"].get("content") if isinstance(choice.get("message"), dict) else choice["text"]
        assert outcome.value.text == (said or "")


@trying(15, 300)
@given(texts(CHAT) | texts(RAW), st.booleans())
def test_labels_of_a_damaged_reply_are_refused_or_log_probabilities(content, raw):
    model = answering(content)
    prompt = LabelPrompt(("q",), raw=raw)
    outcome = attempt(
        "LLM server", "labels of damaged replies", lambda: model.label_logits([prompt], ["Paris", "Lyon"])
    )
    if not outcome.refusal:
        assert outcome.value[0].shape == (1, 2)
        assert np.all(np.isfinite(outcome.value[0]) & (outcome.value[0] <= 0))


@trying(20, 500)
@given(streams(), st.data())
def test_a_stream_is_the_same_however_it_is_cut(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    cut = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert list(parse_events(cut)) == list(parse_events([data]))

    def listen():
        model = answering(data)
        return list(model.stream(Prompt("q"), max_tokens=4))

    outcome = attempt("LLM server", "streams damaged at random", listen)
    if not outcome.refusal:
        assert all(isinstance(piece, str) and piece for piece in outcome.value)


def iter_of(parts):
    yield from parts


@trying(20, 500)
@given(texts(FOUND))
def test_a_damaged_search_reply_is_refused_or_read_as_it_stands(body):
    outcome = attempt("search server", "replies damaged at random", lambda: parse_search_response(body, "the server"))
    if not outcome.refusal:
        for passage in outcome.value:
            assert isinstance(passage.id, str)
            assert passage.text.strip()
            assert passage.score is None or math.isfinite(passage.score)


@trying(20, 300)
@given(st.sampled_from(WAITS) | st.text(max_size=30) | st.text("0123456789:, +-JanFeGMT.eE", max_size=40))
def test_a_time_to_wait_is_seconds_or_nothing(value):
    waits = attempt("LLM server", "Retry-After at random", lambda: parse_retry_after(value)).value
    assert waits is None or 0 <= waits < math.inf


# --- over a real connection ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with HostileServer() as running:
        yield running


@pytest.fixture
def doors(server, monkeypatch):
    """The three ways to ask: a request, a stream, a search."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("KNOWGATE_API_KEY", KEY)
    wire = ApiClient(server.url, retry=HASTE, connections=2)
    url = server.url.replace("//", f"//{LOGIN}") + f"/find?api_key={KEY}"
    search = HttpRetriever(url, deadline=0.6, pause=0.001)
    yield {
        "LLM server": lambda: wire.post("/chat/completions", {}),
        "LLM stream": lambda: list(wire.stream("/chat/completions", {})),
        "search server": lambda: search.search(["q"], 3),
    }
    wire.close()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
SLOW = {
    "head by drops": dripping(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500),
    "body by drops": dripping(http(b" " * 500)),
    "status for ever": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers for ever": endless(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 50),
    "one header for ever": endless(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 500),
    "spaces for ever": endless(HEAD, b" " * 65536),
    "lines for ever": endless(HEAD, b"\n" * 1000),
    "one line for ever": endless(HEAD, b"data: x" * 100),
    "brackets for ever": endless(HEAD, b"[" * 1000),
    "keep-alives for ever": endless(HEAD, b": wait\n\n" * 10),
    "events for ever": endless(HEAD, as_line(next(parts_of(CHAT, counts=False)))),
    "chunks for ever": endless(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 100),
    "an error for ever": endless(b"HTTP/1.1 500 Oh\r\n\r\n", b"no " * 1000),
    "a bomb": lambda: iter_of([http(bomb(), content_encoding="gzip")]),
    "a bomb in a bomb": lambda: iter_of([http(bomb(2), content_encoding="gzip, gzip")]),
    "a bomb of another kind": http(b"x" * 1000, content_encoding="br"),
    "silence": lambda: iter_of([b""]),
}


@pytest.mark.parametrize("name", [name for place, name in enumerate(SLOW) if place % 8 == 0 or tries(0, 1)])
def test_a_reply_without_end_ends(name, server, doors):
    server.reply = SLOW[name]
    for door, ask in doors.items():
        assert attempt(door, "replies that are slow, endless or bombs", ask).refusal


@trying(10, 250)
@given(STATUSES, HEADERS, BODIES, st.integers(0, 400) | st.none())
def test_nonsense_over_the_wire_is_a_sentence_without_keys(server, doors, status, headers, body, cut):
    whole = http(body, status, **headers)
    server.reply, before = whole[:cut], len(server.seen)
    for door, ask in doors.items():
        refusal = attempt(door, "raw replies, statuses, headers and cuts at random", ask).refusal
        assert KEY not in refusal
        assert door != "search server" or "hunter22" not in refusal  # the LLM's server has no such login
    assert len(server.seen) - before <= 2 * (HASTE.retries + 1) + MAX_RETRIES + 1


def test_a_redirect_is_not_followed(server, doors):
    with HostileServer() as other:
        other.reply = http(CHAT)
        for status in (301, 302, 303, 307, 308):
            server.reply = http(b"", status, location=other.url)
            for door, ask in doors.items():
                assert str(status) in attempt(door, "redirects", ask).refusal
        assert other.seen == []


def test_a_good_reply_still_comes_through(server, doors):
    server.reply = http(CHAT)
    assert doors["LLM server"]() == parse_json_response(json.dumps(CHAT).encode(), "it")
    server.reply = http(FOUND)
    assert doors["search server"]() == [[Passage("42", "Paris is ...", "Paris", 7.1), Passage("7", "Lyon")]]
