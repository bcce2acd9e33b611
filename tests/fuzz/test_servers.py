"""Hostile servers: whatever an LLM's, a search engine's or a reranker's says, a sentence or a right result, in time."""

import copy
import json
import math

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.models.openai.events import read_events
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.wire import Patience, Wire
from knowgate.rerank.api import rerank_response
from knowgate.retrieval.http import HttpRetriever
from knowgate.retrieval.reply import read_reply
from knowgate.servers import parse_reply, retry_after
from knowgate.types import LabelPrompt, Passage, Prompt, Want
from tests.support.chat_server import ChatServer, as_line, chat_choice, parts_of, raw_choice
from tests.support.fuzz import attempt, tries, trying
from tests.support.hostile_server import HostileServer, bomb, dripping, endless, http

KEY = "sk-do-not-show-this-0123456789"
LOGIN = "user:hunter22@"
HASTE = Patience(timeout=0.4, total=0.6, retries=1, backoff=0.001)
ASKED = {"logprobs": True, "top_logprobs": 5, "temperature": 0.0, "messages": [{"content": "x"}], "prompt": "x"}
CHAT = {"choices": [chat_choice(ASKED, 0, "stop")], "usage": {"completion_tokens": 4}}
RAW = {"choices": [raw_choice({**ASKED, "logprobs": 5}, 0, "length")], "usage": {"completion_tokens": 4}}
FOUND = {"passages": [{"id": "42", "title": "Paris", "text": "Paris is ...", "score": 7.1}, {"id": 7, "text": "Lyon"}]}
RERANK = {"query": "capital?", "documents": ["Paris", {"text": "Lyon", "title": "City"}], "top_n": 2}
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**63,
    10**308,
    -(10**309),
    10**400,
    0.5,
    1e-3,
    -1e-9,
    1e308,
    -1e308,
    -3.4028234663852886e38,
]
ODD = [
    None,
    True,
    False,
    "",
    " ",
    "a",
    "\x1b[31m",
    "\u202e",
    "𝕏",
    "9" * 500,
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": 1},
    [1, 2, 3],
    {"error": "no"},
    {"error": {"message": KEY}},
    {"token": "x"},
    "[DONE]",
    "NaN",
    *NUMBERS,
]
SHAPES = st.sampled_from(ODD) | st.recursive(
    st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
RAW_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1" + "0" * 350]


def places(value, path=()):
    """The path of every value inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, part in inside for deeper in places(part, (*path, key)))]


@st.composite
def damaged(draw, good, most=3):
    """A good reply with some of its parts removed, doubled or replaced by something odd."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, most))):
        *way, last = draw(st.sampled_from([path for path in places(value) if path])) or [None]
        inside = value
        for key in way:
            inside = inside[key]
        change = draw(st.sampled_from(["odd", "gone", "twice"]))
        if change == "gone":
            del inside[last]
        elif change == "twice" and isinstance(inside, list):
            inside.extend(copy.deepcopy(inside[last]) for _ in range(draw(st.sampled_from([1, 2, 300]))))
        else:
            inside[last] = copy.deepcopy(draw(SHAPES))
        if not places(value)[1:]:
            return value
    return value


@st.composite
def texts(draw, good):
    """The same as JSON, some of it with numbers that JSON does not have, cut, or with bytes of its own."""
    text = json.dumps(draw(damaged(good))).encode()
    kind = draw(st.sampled_from(["as it is", "as it is", "number", "cut", "byte", "deep"]))
    place = draw(st.integers(0, max(0, len(text) - 1)))
    match kind:
        case "number":
            return text.replace(b"-0.5108256237659907", draw(st.sampled_from(RAW_NUMBERS)).encode())
        case "cut":
            return text[:place]
        case "byte":
            return text[:place] + draw(st.binary(min_size=1, max_size=3)) + text[place:]
        case "deep":
            return text.replace(b"null", b"[" * 900 + b"]" * 900)
    return text


def answering(content):
    """A model on a server that answers well when it is probed, and then so."""
    server = ChatServer()

    def reply(request):
        good = server(request)
        is_probe = b'"content": "Hi"' in request.content
        return good if is_probe or request.method == "GET" else httpx.Response(200, content=content)

    return OpenAIModel("m", "http://server.test/v1", patience=HASTE, transport=httpx.MockTransport(reply))


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
    return model.read([Prompt("q", raw=raw)], Want(draft_tokens=4))[0].draft


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


@st.composite
def streams(draw):
    """Events of an answer: damaged, swapped, repeated, with others in between, perhaps without an end."""
    good = [as_line(part) for part in parts_of(draw(st.sampled_from([CHAT, RAW])), counts=True)]
    parts = good + [as_line(part) for part in draw(st.lists(damaged(next(parts_of(CHAT, counts=False))), max_size=2))]
    parts += draw(
        st.lists(
            st.sampled_from(
                [
                    b": keep-alive\n\n",
                    b"event: ping\n",
                    b"data:\n\n",
                    b"\n",
                    b"data: {\n\n",
                    b"error: oh\n\n",
                    b"data: 7\n\n",
                    b"\xff\n",
                    b'data: {"error": {"message": "' + KEY.encode() + b'"}}\n\n',
                    b'data: {"choices":[{"index":1,"delta":{"content":"B"}}]}\n\n',
                    b"{}",
                    b"[",
                    b"data: [DONE]\n\n",
                    b"data: [DONE]",
                    b"id: 1\r\n",
                    b"data: " + b"[" * 900 + b"\n\n",
                ]
            ),
            max_size=4,
        )
    )
    order = draw(st.permutations(parts)) if draw(st.booleans()) else parts
    return b"".join(order) + draw(st.sampled_from([b"", b"data: [DONE]\n\n", b"data: [DON"]))


@trying(20, 500)
@given(streams(), st.data())
def test_a_stream_is_the_same_however_it_is_cut(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    cut = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert list(read_events(cut)) == list(read_events([data]))

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
    outcome = attempt("search server", "replies damaged at random", lambda: read_reply(body, "the server"))
    if not outcome.refusal:
        for passage in outcome.value:
            assert isinstance(passage.id, str)
            assert passage.text.strip()
            assert passage.score is None or math.isfinite(passage.score)


class Lengths:
    """A reranker that likes long passages."""

    name = "lengths"
    fingerprint = "lengths"

    def score(self, questions, passages):
        return [[float(len(one.text)) for one in shown] for shown in passages]


@trying(20, 400)
@given(damaged(RERANK))
def test_a_damaged_rerank_request_is_refused_or_ranked(request):
    outcome = attempt("rerank API", "requests damaged at random", lambda: rerank_response(request, Lengths()))
    if not outcome.refusal:
        shares = [result["relevance_score"] for result in outcome.value["results"]]
        assert shares == sorted(shares, reverse=True)
        assert all(0 <= share <= 1 for share in shares)
        assert len({result["index"] for result in outcome.value["results"]}) == len(shares)


WAITS = [
    "",
    "1",
    " 7 ",
    "1.5",
    "-1",
    "+3",
    "٣",
    "²",
    "1_000",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "0x10",
    "1;2",
    "soon",
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "Fri, 31 Dec 1999 23:59:59 GMT",
    "Fri, 31 Dec 99999 23:59:59 GMT",
    "Fri, 31 Dec 2027 23:59:59 +9999",
    "Fri, 31 Dec 2027 23:59:59 -99999999999999999999",
    "31 Dec",
    "0 0 0 0:0:0",
    "Fri, 31 Feb 2027 25:61:61 GMT",
    "Mon, 01 Jan 2027 00:00:00",
]


@trying(20, 300)
@given(st.sampled_from(WAITS) | st.text(max_size=30) | st.text("0123456789:, +-JanFeGMT.eE", max_size=40))
def test_a_time_to_wait_is_seconds_or_nothing(value):
    waits = attempt("LLM server", "Retry-After at random", lambda: retry_after(value)).value
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
    wire = Wire(server.url, patience=HASTE, connections=2)
    url = server.url.replace("//", f"//{LOGIN}") + f"/find?api_key={KEY}"
    search = HttpRetriever(url, deadline=0.6, retries=1, pause=0.001)
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


STATUSES = st.sampled_from(
    [
        100,
        101,
        204,
        206,
        300,
        301,
        302,
        304,
        307,
        400,
        401,
        403,
        404,
        408,
        418,
        422,
        429,
        500,
        501,
        502,
        503,
        529,
        599,
        600,
        999,
        0,
        -1,
        "abc",
        200,
        200,
        200,
    ]
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "retry_after": st.sampled_from([wait for wait in WAITS if wait.isascii() and wait not in ("1", "1.5")]),
        "location": st.sampled_from(["http://other.test/", "//other.test", "/v2", "file:///etc/passwd", "\x00"]),
        "content_length": st.sampled_from(["-5", "9" * 30, "0", "3", "abc", "1, 2"]),
        "transfer_encoding": st.sampled_from(["chunked", "gzip, chunked", "nonsense"]),
        "content_encoding": st.sampled_from(["gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "nonsense"]),
        "content_type": st.sampled_from(
            ["text/html; charset=nonsense", "application/json; charset=utf-16", "\x1b[31m"]
        ),
        "x" * 70: st.sampled_from(["y" * 70000, "ü", ""]),
    },
)
BODIES = (
    texts(CHAT) | texts(FOUND) | streams() | st.binary(max_size=200) | st.just(f'{{"error": "{KEY} {LOGIN}"}}'.encode())
)


@trying(10, 250)
@given(STATUSES, HEADERS, BODIES, st.integers(0, 400) | st.none())
def test_nonsense_over_the_wire_is_a_sentence_without_keys(server, doors, status, headers, body, cut):
    whole = http(body, status, **headers)
    server.reply, before = whole[:cut], len(server.seen)
    for door, ask in doors.items():
        refusal = attempt(door, "raw replies, statuses, headers and cuts at random", ask).refusal
        assert KEY not in refusal
        assert door != "search server" or "hunter22" not in refusal  # the LLM's server has no such login
    assert len(server.seen) - before <= 3 * (HASTE.retries + 1)


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
    assert doors["LLM server"]() == parse_reply(json.dumps(CHAT).encode(), "it")
    server.reply = http(FOUND)
    assert doors["search server"]() == [[Passage("42", "Paris is ...", "Paris", 7.1), Passage("7", "Lyon")]]
