from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from knowgate.errors import BadSetting, RejectionError, ServerError
from knowgate.retrieval.engines.http import MAX_PASSAGES, MAX_VALUES, HttpRetriever, parse_search_response
from knowgate.types import Passage
from tests.support.processes import PATIENCE

URL = "https://search.example/find"
Handler = Callable[[httpx.Request], httpx.Response]


def retriever(handler: Handler, url: str = URL, **options: Any) -> HttpRetriever:
    options = {"deadline": PATIENCE, "pause": 0.0, **options}
    return HttpRetriever(url, transport=httpx.MockTransport(handler), **options)


def answering(value: object) -> Handler:
    return lambda request: httpx.Response(200, json=value)


def test_the_query_is_posted_as_json():
    def handler(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        return httpx.Response(200, json=[{"id": request.method, "text": f"{asked['query']} {asked['k']}"}])

    assert retriever(handler).search(["who?", "北京"], 3) == [
        [Passage("POST", "who? 3")],
        [Passage("POST", "北京 3")],
    ]


def test_a_response_of_more_than_4_mb_is_rejected():
    """Other questions may get smaller ones, so it does not count as a failure of the server."""
    passages = [{"id": str(number), "text": "x" * 1_000_000} for number in range(4)]
    assert len(retriever(answering(passages)).search(["who?"], 1)[0][0].text) == 1_000_000
    with pytest.raises(RejectionError, match="more than 4,194,304 bytes"):
        retriever(answering([*passages, {"id": "4", "text": "x" * 200_000}])).search(["who?"], 1)


def test_a_url_template_is_requested_by_get():
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=[{"id": request.method, "text": str(request.url.params)}])

    (found,) = retriever(handler, "https://search.example/?q={query}&n={k}").search(["a&b c"], 2)
    assert found == [Passage("GET", "q=a%26b+c&n=2")]


@pytest.mark.parametrize("url", [URL, "https://search.example/?q={query}"])
def test_a_long_query_is_cut(url: str):
    def handler(request: httpx.Request) -> httpx.Response:
        query = request.url.params.get("q") or json.loads(request.content)["query"]
        return httpx.Response(200, json=[{"id": str(len(query)), "text": query}])

    results = retriever(handler, url).search(["\U0001f642" * 9_000, "a  b\n" * 200], 1)
    assert [found[0].id for found in results] == ["2000", str(2 * 256 - 1)]


@pytest.mark.parametrize("name", ["passages", "results", "documents", "hits"])
@pytest.mark.parametrize("text", ["text", "content"])
def test_usual_response_formats_are_parsed(name: str, text: str):
    reply = {name: [{"id": 4, "title": "T", text: "body", "score": 2}], "took": 3}
    assert retriever(answering(reply)).search(["q"], 5) == [[Passage("4", "body", "T", 2.0)]]


def test_surplus_passages_are_dropped():
    (found,) = retriever(answering([{"id": str(n), "text": "x"} for n in range(9)])).search(["q"], 2)
    assert [passage.id for passage in found] == ["0", "1"]


def test_of_many_passages_only_the_first_ones_are_read():
    passages = parse_search_response(
        json.dumps([{"text": f"text {i}"} for i in range(MAX_PASSAGES)] + [7]).encode(), "it"
    )
    assert len(passages) == MAX_PASSAGES


def test_responses_with_too_many_values_are_rejected():
    passages = [{"text": "x", "tags": [0] * 10}] * (MAX_VALUES // 10)
    with pytest.raises(RejectionError, match="more than 250,000 JSON values"):
        parse_search_response(json.dumps(passages).encode(), "it")


def test_an_empty_response_gives_no_passages():
    assert retriever(answering({"results": []})).search(["q"], 2) == [[]]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ({"answer": 42}, "no list of passages"),
        ("text", "no list of passages"),
        (["text"], "passage 0 is not an object"),
        ([{"id": "1"}], "passage 0 has no text"),
        ([{"id": "1", "text": 7}], "passage 0 has no text"),
        ([{"id": "1", "text": "x", "score": "high"}], "score that is not a number"),
        ([{"id": [], "text": "x"}], "id or title"),
    ],
)
def test_an_invalid_response_names_the_url_and_the_expected_format(reply: object, problem: str):
    with pytest.raises(ServerError, match=rf"https://search\.example/find.*{problem}.*must be a JSON list"):
        retriever(answering(reply)).search(["q"], 2)


@pytest.mark.parametrize(
    "reply", [{"error": "no hits", "query": "Is Ms Miller ill?"}, "<p>Nothing found for Ms Miller"]
)
def test_the_short_form_of_an_error_does_not_quote_the_response(reply: object):
    with pytest.raises(ServerError, match="Miller") as error:
        retriever(answering(reply)).search(["q"], 2)
    assert error.value.brief == (
        "the search server https://search.example/find returned an invalid response: the response has no list of passages"
    )


def test_a_repeated_passage_is_returned_once():
    rows = [("a", "x", 3), ("a", "x", 2), ("a", "y", 2), ("b", "x", 1)]
    reply = [{"id": id, "text": text, "score": score} for id, text, score in rows]
    (found,) = retriever(answering(reply)).search(["q"], 3)
    assert [(passage.id, passage.text, passage.score) for passage in found] == [
        ("a", "x", 3),
        ("a", "y", 2),
        ("b", "x", 1),
    ]


@pytest.mark.parametrize("padding", [0, 60])
def test_an_error_does_not_show_a_login_that_the_server_repeats(padding: int):
    echo = answering({"error": padding * "x" + "hunter22hunter22"})
    with pytest.raises(ServerError, match="no list of passages") as error:
        retriever(echo, "https://me:hunter22hunter22@search.example/find").search(["q"], 2)
    assert "hunter" not in str(error.value)


def test_a_response_that_is_not_json_is_an_error():
    with pytest.raises(ServerError, match=r"not valid JSON.*'<html>"):
        retriever(lambda request: httpx.Response(200, text="<html>hello")).search(["q"], 2)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_retried(status: int):
    replies = iter([httpx.Response(status), httpx.Response(200, json=[{"id": "1", "text": "x"}])])
    assert retriever(lambda request: next(replies)).search(["q"], 1) == [[Passage("1", "x")]]


def test_a_lost_connection_is_tried_three_times():
    tries: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        raise httpx.ConnectError("refused")

    with pytest.raises(ServerError, match=r"ConnectError: refused. No request succeeded"):
        retriever(handler).search(["q"], 1)
    assert len(tries) == 3


def test_a_client_error_is_not_retried():
    tries: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        return httpx.Response(401, text="no key")

    with pytest.raises(ServerError, match="status 401: no key"):
        retriever(handler).search(["q"], 1)
    assert len(tries) == 1


def test_a_retry_after_the_deadline_is_not_awaited():
    def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"Retry-After": "1000000"})

    with pytest.raises(ServerError, match=r"status 429. No request succeeded"):
        retriever(busy).search(["q"], 1)


def test_a_slow_response_ends_at_the_deadline():
    def drip() -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b" "

    with pytest.raises(ServerError, match="ReadTimeout"):
        retriever(lambda request: httpx.Response(200, content=drip()), deadline=0.1).search(["q"], 1)


def test_keys_in_the_url_never_appear_in_errors():
    with pytest.raises(ServerError) as caught:
        retriever(lambda request: httpx.Response(403), "https://me:secret@x.example/s?key=hidden").search(["q"], 1)
    assert "https://x.example/s" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x", "search.example", "http://x:notaport/"])
def test_an_invalid_url_is_an_error(url: str):
    with pytest.raises(BadSetting, match="is not a valid address for the search server"):
        HttpRetriever(url)
