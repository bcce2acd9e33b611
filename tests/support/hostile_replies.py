"""Strategies for what a hostile server may say: good replies damaged, streams, statuses, headers."""

import copy
import json

from hypothesis import strategies as st

from tests.support.chat_server import as_line, chat_choice, parts_of, raw_choice

KEY = "sk-do-not-show-this-0123456789"


LOGIN = "user:hunter22@"


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
