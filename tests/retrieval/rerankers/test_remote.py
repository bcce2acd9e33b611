from __future__ import annotations

import json

import httpx
import pytest

from knowgate.errors import BadSetting, RejectionError, ServerError
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.remote import RemoteReranker, TeiReranker
from knowgate.types import Passage

SPEC = "big@https://rerank.example/v1/rerank"
PASSAGES = [Passage("1", "sky"), Passage("2", "an apple", title="red"), Passage("3", "tree")]


def served(handle, **options) -> RemoteReranker:
    return RemoteReranker(SPEC, pause=0.0, transport=httpx.MockTransport(handle), **options)


def ours(request: httpx.Request) -> httpx.Response:
    """Rank longer documents higher, best first, as rerank servers do."""
    documents = json.loads(request.content)["documents"]
    results = [{"index": index, "relevance_score": len(text) / 100} for index, text in enumerate(documents)]
    return httpx.Response(200, json={"results": sorted(results, key=lambda result: -result["relevance_score"])})


def test_scores_are_in_the_order_of_the_passages():
    scores = served(ours).score(["what?", "why?", "none"], [PASSAGES, PASSAGES[:1], []])
    assert [sorted(range(3), key=lambda place: -scores[0][place]), scores[1], scores[2]] == [
        [1, 2, 0], [scores[0][0]], [],
    ]  # fmt: skip


def test_model_title_and_key_are_sent(monkeypatch):
    monkeypatch.setenv("KNOWGATE_RERANK_KEY", "secret")
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append((json.loads(request.content), request.headers["authorization"]))
        return ours(request)

    served(handle).score(["what?"], [PASSAGES[1:2]])
    assert seen == [({"model": "big", "query": "what?", "documents": ["red\nan apple"]}, "Bearer secret")]


def test_a_long_question_is_cut_and_a_rejected_one_is_told_from_a_failure():
    lengths = []

    def reject(request: httpx.Request) -> httpx.Response:
        lengths.append(len(json.loads(request.content)["query"]))
        return httpx.Response(413)

    with pytest.raises(RejectionError, match="status 413"):
        served(reject).score(["lorem ipsum " * 300], [PASSAGES])
    assert lengths == [len("lorem ipsum " * 128) - 1]
    with pytest.raises(ServerError, match="status 403") as failure:
        served(lambda request: httpx.Response(403)).score(["q"], [PASSAGES])
    assert not isinstance(failure.value, RejectionError)


def test_a_busy_server_is_retried():
    replies = iter([httpx.Response(503), httpx.Response(429)])
    scores = served(lambda request: next(replies, None) or ours(request)).score(["q"], [PASSAGES[:1]])
    assert len(scores[0]) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(401, text="no key"), "status 401: no key"),
        (httpx.Response(500), "status 500"),
        (httpx.Response(200, text="<html>"), "is not valid JSON"),
        (httpx.Response(200, json=[]), "one score for each of 3 documents"),
        (
            httpx.Response(200, json={"results": [{"index": 0, "relevance_score": 1}]}),
            "one score for each of 3 documents",
        ),
        (
            httpx.Response(200, json={"results": [{"index": n, "relevance_score": None} for n in range(3)]}),
            "one score for each of 3 documents",
        ),
    ],
)
def test_an_invalid_server_is_an_error(reply, message):
    with pytest.raises(ServerError, match=message):
        served(lambda request: reply).score(["q"], [PASSAGES])


@pytest.mark.parametrize("spec", ["api:", "api:model", "api:@https://x", "api:model@ftp://x"])
def test_a_spec_without_a_server_is_an_error(spec):
    with pytest.raises(BadSetting, match="Write api:MODEL@URL"):
        load_reranker(spec)


def test_a_login_in_the_url_is_an_error():
    with pytest.raises(BadSetting, match="KNOWGATE_RERANK_KEY"):
        load_reranker("api:m@https://user:pass@host/rerank")


# --- text-embeddings-inference --------------------------------------------------------------------


def tei(handle) -> TeiReranker:
    return TeiReranker("http://tei.example/rerank", pause=0.0, transport=httpx.MockTransport(handle))


def test_a_tei_server_gets_its_format_in_batches():
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append(len(body["texts"]))
        scored = [{"index": place, "score": float(len(text))} for place, text in enumerate(body["texts"])]
        return httpx.Response(200, json=sorted(scored, key=lambda one: -one["score"]))

    many = [Passage(str(i), "x" * (i + 1)) for i in range(40)]
    assert tei(handle).score(["what?"], [many]) == [[float(i + 1) for i in range(40)]]
    assert seen == [32, 8]


@pytest.mark.parametrize("reply", [{}, {"results": []}, [{"index": 0}], [5], [{"index": 9, "score": 1.0}]])
def test_a_response_that_is_not_from_tei_is_an_error(reply):
    with pytest.raises(ServerError):
        tei(lambda request: httpx.Response(200, json=reply)).score(["q"], [PASSAGES[:1]])


def test_a_tei_server_is_named_by_its_spec():
    assert load_reranker("tei:http://tei.example/rerank").name == "tei:http://tei.example/rerank"
