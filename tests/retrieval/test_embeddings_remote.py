"""Embeddings by a server of OpenAI's form."""

import json

import httpx
import numpy as np
import pytest

from knowgate.errors import BadSetting, ServerError
from knowgate.retrieval import load_retriever
from knowgate.retrieval.embeddings import MAX_WIDTH, RemoteEmbedder, SentenceEmbedder, load_embedder
from knowgate.retrieval.index import build_index
from tests.support.hash_embedder import HashEmbedder
from tests.support.llama_server import running_llama
from tests.support.retrieval_fakes import write_records

SPEC = "openai:small@http://embed.test/v1"
HASH = HashEmbedder(16)


class Server:
    """Embeds by hash, twice as long, in reverse order: clients sort by index and normalise."""

    def __init__(self):
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        texts = json.loads(request.content)["input"]
        rows = [
            {"object": "embedding", "index": i, "embedding": (2 * HASH.embed([text])[0]).tolist()}
            for i, text in enumerate(texts)
        ]
        return httpx.Response(200, json={"object": "list", "data": rows[::-1], "model": "small", "usage": {}})


def embedder(handler):
    return RemoteEmbedder(SPEC, transport=httpx.MockTransport(handler))


def test_texts_are_embedded_in_batches_and_returned_in_order():
    server, texts = Server(), [f"text {i}" for i in range(150)]
    vectors = embedder(server).embed(texts)
    np.testing.assert_allclose(vectors, HASH.embed(texts), atol=1e-6)
    assert [len(json.loads(request.content)["input"]) for request in server.requests].count(64) == 2
    assert server.requests[0].url == "http://embed.test/v1/embeddings"


def test_the_api_key_is_sent_and_never_appears_in_errors(monkeypatch):
    monkeypatch.setenv("KNOWGATE_EMBED_KEY", "sk-very-secret")
    seen = []

    def refuse(request):
        seen.append(request.headers["Authorization"])
        return httpx.Response(401, text="bad key sk-very-secret")

    with pytest.raises(ServerError) as told:
        embedder(refuse).embed(["a"])
    assert seen == ["Bearer sk-very-secret"]
    assert "sk-very-secret" not in str(told.value)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [],
        {"data": []},
        {"data": [{"index": 0}]},
        {"data": [{"index": 0, "embedding": ["x"]}]},
        {"data": [{"index": 0, "embedding": []}]},
        {"data": [{"index": 0, "embedding": [0.0, 0.0]}]},
        {"data": [{"index": 0, "embedding": [1e308, 1e308]}]},
        {"data": [{"index": None, "embedding": [1.0]}]},
    ],
)
def test_an_invalid_response_is_an_error(reply):
    with pytest.raises(ServerError):
        embedder(lambda request: httpx.Response(200, json=reply)).embed(["a"])


def test_a_busy_server_is_retried():
    replies, server = [httpx.Response(503), httpx.Response(429, headers={"Retry-After": "0"})], Server()
    made = embedder(lambda request: replies.pop() if replies else server(request))
    assert made.embed(["a"]).shape == (1, 16)


@pytest.mark.parametrize("spec", ["openai:", "openai:m", "openai:m@ftp://x", "openai:m@http://user:key@x/v1"])
def test_an_invalid_spec_explains_the_format(spec):
    with pytest.raises(BadSetting, match="Write openai:MODEL@URL"):
        RemoteEmbedder(spec)


def test_the_spec_selects_the_kind_of_embedder():
    assert isinstance(load_embedder(SPEC), RemoteEmbedder)
    assert isinstance(load_embedder("minilm"), SentenceEmbedder)
    assert load_embedder(SPEC).fingerprint != load_embedder("openai:large@http://embed.test/v1").fingerprint


def test_an_index_is_built_and_searched_with_a_remote_embedder(tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.retrieval.embeddings.RemoteEmbedder", lambda spec: embedder(Server()))
    source = write_records(tmp_path / "r.jsonl", {"a": "Mira runs the canteen.", "b": "The stove is new."})
    build_index(source, tmp_path / "index", kind="dense", embedder=SPEC)
    (found,) = load_retriever(str(tmp_path / "index")).search(["Who runs the canteen?"], 1)
    assert found[0].text == "Mira runs the canteen."


@pytest.mark.model
def test_a_real_server_embeds_texts():
    """llama.cpp on the embedded LLM, as an embedder."""
    pytest.importorskip("xllamacpp", reason="needs the extra llamacpp")
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by two percent."]
    with running_llama(embeddings=True) as url:
        made = RemoteEmbedder(f"openai:smollm@{url}")
        first, near, far = (made.embed([text])[0] for text in texts)
        together = made.embed(texts)
    assert together.shape == (3, 576)  # the width of the LLM
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    # places are kept; that server's own batches of a causal LLM are not exact, so the one between is not compared
    np.testing.assert_allclose(together[[0, 2]], [first, far], atol=0.02)
    assert first @ near > first @ far


@pytest.mark.parametrize(("width", "is_accepted"), [(MAX_WIDTH, True), (MAX_WIDTH + 1, False)])
def test_the_width_of_vectors_is_limited(width, is_accepted):
    rows = [{"index": 0, "embedding": [1.0] * width}]
    remote = embedder(lambda request: httpx.Response(200, json={"data": rows}))
    if is_accepted:
        assert remote.embed(["a"]).shape == (1, width)
    else:
        with pytest.raises(ServerError, match="at most 16,384 numbers"):
            remote.embed(["a"])


def test_cookies_of_a_server_are_not_kept():
    seen = []

    def answer(request):
        seen.append(request.headers.get("Cookie"))
        rows = [{"index": 0, "embedding": [1.0, 0.0]}]
        return httpx.Response(200, json={"data": rows}, headers={"Set-Cookie": "session=7"})

    remote = embedder(answer)
    for text in ("a", "b"):
        remote.embed([text])
    assert seen == [None, None]
