"""What adapters read from outside: replies of search engines and embedding servers, specs, exports of other tools."""

import itertools
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.data.questions import load_questions
from knowgate.retrieval.embeddings import RemoteEmbedder
from knowgate.retrieval.engines.base import parse_collection_spec
from knowgate.retrieval.engines.elastic import ElasticRetriever
from knowgate.retrieval.engines.web import WebRetriever, open_web
from knowgate.retrieval.engines.web_engines import WebOptions
from knowgate.retrieval.rerankers.remote import TeiReranker
from knowgate.types import Passage
from tests.data.questions.test_exports import LANGFUSE, LANGSMITH, PHOENIX
from tests.retrieval.engines.test_web import BRAVE, SEARXNG, TAVILY
from tests.support.fuzz import attempt, trying
from tests.support.hostile_replies import texts

HITS = {"took": 1, "timed_out": False, "hits": {"total": {"value": 1}, "hits": [{"_id": "1", "_score": 1.5, "_source": {"text": "a", "title": "b"}}]}}  # fmt: skip  # noqa: E501
VECTORS = {"data": [{"index": 1, "embedding": [0.6, 0.8]}, {"index": 0, "embedding": [1.0, 0.0]}]}
SCORES = [{"index": 0, "score": 0.5}, {"index": 1, "score": -2.5}]
NUMBERED = itertools.count()


def saying(body):
    return httpx.MockTransport(lambda request: httpx.Response(200, content=body))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def check_passages(rows):
    for passage in (one for row in rows for one in row):
        assert passage.text.strip()
        assert isinstance(passage.id, str)
        assert isinstance(passage.title, str)
        assert passage.score is None or math.isfinite(passage.score)


@trying(20, 500)
@given(texts(HITS))
def test_a_damaged_reply_of_elasticsearch_is_refused_or_read(body):
    retriever = ElasticRetriever("http://search.test", "i", transport=saying(body))
    outcome = attempt("search server", "replies of Elasticsearch, damaged", lambda: retriever.search(["q"], 3))
    if not outcome.refusal:
        check_passages(outcome.value)


@trying(20, 500)
@given(texts(VECTORS))
def test_damaged_vectors_are_refused_or_have_length_one(body):
    embedder = RemoteEmbedder("openai:m@http://embed.test/v1", transport=saying(body))
    outcome = attempt("embedding server", "replies damaged at random", lambda: embedder.embed(["a", "b"]))
    if not outcome.refusal:
        assert len(outcome.value) == 2
        np.testing.assert_allclose(np.linalg.norm(outcome.value, axis=1), 1, atol=1e-4)


@trying(15, 300)
@given(texts(SCORES))
def test_damaged_scores_of_tei_are_refused_or_numbers(body):
    reranker = TeiReranker("http://tei.test/rerank", pause=0.0, transport=saying(body))
    passages = [Passage("1", "a"), Passage("2", "b")]
    outcome = attempt("rerank server", "replies of TEI, damaged", lambda: reranker.score(["q"], [passages]))
    if not outcome.refusal:
        assert all(math.isfinite(score) for score in outcome.value[0])


@pytest.mark.parametrize(("engine", "good"), [("searxng", SEARXNG), ("tavily", TAVILY), ("brave", BRAVE)])
def test_damaged_replies_of_web_search_are_refused_or_read(engine, good, folder, monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", "key-for-tests")
    monkeypatch.setenv("BRAVE_API_KEY", "key-for-tests")

    @trying(10, 300)
    @given(texts(good))
    def look(body):
        options = WebOptions(days=0, minute=1_000_000, day=1_000_000)
        cache = folder / str(next(NUMBERED))
        monkeypatch.setattr("knowgate.retrieval.engines.web.cache_dir", lambda: cache)
        retriever = WebRetriever(engine, "http://web.test", options, saying(body))
        outcome = attempt("search server", f"replies of {engine}, damaged", lambda: retriever.search(["q"], 3))
        if not outcome.refusal:
            check_passages(outcome.value)

    look()


@trying(40, 1000)
@given(st.text(st.characters(), max_size=60) | st.from_regex(r"(http://h/|/f/)?c(\?[a-z.]{1,9}=[ -~]{0,9}){0,2}"))
def test_any_text_is_a_spec_or_refused(text):
    attempt("retriever specs", "texts at random", lambda: parse_collection_spec("qdrant", text))
    if not text.startswith("replay"):
        attempt("retriever specs", "texts at random, of the web", lambda: open_web(text))


@pytest.mark.parametrize(("tool", "good"), [("langsmith", LANGSMITH), ("langfuse", LANGFUSE), ("phoenix", PHOENIX)])
def test_damaged_exports_are_refused_or_read(tool, good, folder):
    @trying(10, 300)
    @given(texts(good))
    def look(body):
        file = folder / "export.jsonl"
        file.write_bytes(body.replace(b"\n", b" ") + b"\n")
        outcome = attempt("data files", f"exports of {tool}, damaged", lambda: load_questions(f"{tool}:{file}"))
        if not outcome.refusal:
            assert all(question.text.strip() for question in outcome.value)

    look()


@trying(20, 500)
@given(st.binary(max_size=200) | st.text(st.sampled_from('question,answers\n"a;|\t\0é'), max_size=80).map(str.encode))
def test_any_bytes_are_a_table_or_refused(body):
    with TemporaryDirectory() as place:
        file = Path(place) / "a.csv"
        file.write_bytes(b"question,answers\n" + body)
        attempt("data files", "tables of any bytes", lambda: load_questions(f"csv:{file}"))
