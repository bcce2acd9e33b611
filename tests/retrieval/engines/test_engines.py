"""What every search engine must do behind the same role: ours, those that run in-process, and two stubs."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from knowgate.core.http_client import MAX_RESPONSE_BYTES
from knowgate.core.network_deadline import request_deadline
from knowgate.errors import AdapterError, BadSetting, KnowgateError, ServerError
from knowgate.gates import load_gate
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.retrieval import load_retriever
from knowgate.retrieval.engines.base import FieldNames, SearchHit, check_filter, get_field, parse_collection_spec
from knowgate.retrieval.engines.elastic import ElasticRetriever
from knowgate.retrieval.engines.http import MAX_VALUES
from tests.support.elastic_stub import ElasticStub
from tests.support.engines import DOCUMENTS, EMBEDDER, ENGINES, vector
from tests.support.hash_embedder import HashEmbedder
from tests.support.hostile_server import HostileServer, dripping, http

QUERY = "Who runs the canteen of Balaland?"
OTHER = "Who wrote the glossary of terms?"
ODD = ["", " ", "\0", "a" * 20_000, "\ud800", "🙂", "' OR 1=1 --", '{"query": {}}', "中文 问题"]


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    return ENGINES[request.param](tmp_path)


@pytest.fixture(params=sorted(set(ENGINES) - {"bm25", "dense", "hybrid"}))
def outside(request, tmp_path):
    """Engines of others, which have fields to filter by."""
    engine = ENGINES[request.param](tmp_path)
    if not hasattr(engine.retriever, "filtered"):
        pytest.skip("no fields to filter by")
    return engine


def test_passages_are_sorted_by_decreasing_score(engine):
    (found,) = engine.retriever.search([QUERY], 3)
    assert found[0].id.startswith("canteen")
    assert found[0].text == DOCUMENTS["canteen"]["text"]
    scores = [item.score for item in found]
    assert scores == sorted(scores, reverse=True)


def test_at_most_k_passages_are_returned(engine):
    assert [len(row) for row in engine.retriever.search([QUERY, OTHER], 1)] == [1, 1]
    assert len(engine.retriever.search([QUERY], 50)[0]) <= 3


def test_a_batch_equals_its_single_queries(engine):
    together = engine.retriever.search([QUERY, OTHER, QUERY], 2)
    alone = [engine.retriever.search([query], 2)[0] for query in (QUERY, OTHER, QUERY)]
    assert [[item.id for item in row] for row in together] == [[item.id for item in row] for row in alone]
    assert together[0][0].id != together[1][0].id


def test_an_empty_batch_is_empty_and_k_must_be_positive(engine):
    assert engine.retriever.search([], 3) == []
    with pytest.raises(BadSetting, match="k=0 is not allowed"):
        engine.retriever.search([QUERY], 0)


def test_unusual_queries_are_searched(engine):
    found = engine.retriever.search(ODD, 2)
    assert len(found) == len(ODD)
    assert all(len(row) <= 2 for row in found)


def test_the_fingerprint_changes_with_the_collection(engine):
    before = engine.retriever.fingerprint
    assert engine.reopen().fingerprint == before
    engine.add()
    assert engine.reopen().fingerprint != before


def test_another_thread_can_search(engine):
    with ThreadPoolExecutor(1) as other:
        (found,) = other.submit(engine.retriever.search, [QUERY], 1).result()
        assert other.submit(lambda: engine.retriever.fingerprint).result() == engine.retriever.fingerprint
    assert found[0].text == DOCUMENTS["canteen"]["text"]


def test_a_pipeline_retrieves_from_it(engine):
    model = FakeModel({QUERY: {"closed": "Nobody", "open": "Mira"}})
    answer = AdaptiveRAG(model, load_gate("always"), engine.retriever).answer(QUERY)
    assert (answer.text, answer.passages[0].text) == ("Mira", DOCUMENTS["canteen"]["text"])


# --- engines of others ----------------------------------------------------------------------------


def test_titles_and_ids_come_from_the_named_fields(outside):
    (found,) = outside.retriever.search([QUERY], 1)
    assert (found[0].id, found[0].title) == ("canteen", "Canteen")


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({"team": "mountain"}, {"stove"}),
        ({"team": "office", "year": 2024}, {"glossary"}),
        ({"year": [2023, 2024]}, {"canteen", "stove", "glossary"}),
        ({"team": "it's nobody's"}, set()),
    ],
)
def test_a_filter_keeps_only_matching_records(outside, where, ids):
    words = "Mira Ada wrote runs the canteen stove glossary"
    found = outside.retriever.filtered(where).search([words], 5)[0]
    assert {item.id for item in found} == ids


def test_filters_only_narrow(outside):
    """Whoever was given part of a collection cannot ask for another part of it."""
    office, words = outside.retriever.filtered({"team": "office"}), "Mira Ada runs the canteen stove glossary"
    assert office.filtered({"team": "mountain"}).search([words], 5) == [[]]
    assert {item.id for item in office.filtered({"team": ["office", "mountain"]}).search([words], 5)[0]} == {
        "canteen",
        "glossary",
    }
    assert {item.id for item in office.filtered({"year": 2024}).search([words], 5)[0]} == {"glossary"}


def test_a_filter_changes_the_fingerprint_of_the_copy_only(outside):
    before = outside.retriever.fingerprint
    assert outside.retriever.filtered({"team": "office"}).fingerprint != before
    assert outside.retriever.fingerprint == before
    assert len(outside.retriever.search(["Mira Ada the"], 5)[0]) >= 2


def test_a_missing_text_field_is_an_error(outside):
    other = outside.reopen()
    other.fields = dataclasses.replace(other.fields, text="body")
    with pytest.raises(
        AdapterError,
        match=r"without a text in the field 'body'.*Add the name of the text field to the address: \?text=FIELD",
    ):
        other.search([QUERY], 1)


def test_records_without_text_are_skipped_if_others_have_text(outside):
    good, bad = SearchHit("1", {"text": "Mira runs it."}, 1.0), SearchHit("2", {"text": None}, 1.0)
    other = outside.reopen()
    other.fields = dataclasses.replace(other.fields, text="text")
    other._find_hits = lambda queries, k: [[bad, good] for _ in queries]
    assert [passage.text for passage in other.search([QUERY], 2)[0]] == ["Mira runs it."]


def test_vectors_of_another_width_are_an_error(outside):
    other = outside.reopen()
    other.__dict__["embedder"] = HashEmbedder(8, "other")
    if not other.is_dense:  # searches by words: which embedder there would be is all the same
        assert other.search([QUERY], 1)[0][0].id == "canteen"
        return
    assert other.fingerprint != outside.retriever.fingerprint
    with pytest.raises(KnowgateError, match=r"failed|status 400"):
        other.search([QUERY], 1)


# --- specs ----------------------------------------------------------------------------------------


def test_a_spec_is_parsed():
    spec = parse_collection_spec(
        "qdrant", "http://h:6333/hand%20book?text=body&title=t&filter.team=hr,it&filter.year=2024&version=7"
    )
    assert (spec.address, spec.collection) == ("http://h:6333", "hand book")
    assert spec.options == {
        "fields": FieldNames("body", "t"),
        "embedder": "minilm",
        "where": {"team": ["hr", "it"], "year": [2024]},
        "version": "7",
    }


@pytest.mark.parametrize("value", ["", "collection", "http://host", "http://", "x?text=a"])
def test_a_spec_without_a_collection_explains_the_format(value):
    with pytest.raises(BadSetting, match=r"does not name a collection\. Write qdrant:ADDRESS/COLLECTION"):
        parse_collection_spec("qdrant", value)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(BadSetting, match=r"no option 'txt'. Known options: text, title, .*mode, filter.FIELD"):
        parse_collection_spec("elastic", "http://h/i?txt=a", extra_options=("mode",))


@pytest.mark.parametrize("where", [{"a b": 1}, {"a": []}, {"a": {"b": 1}}, {"a; DROP": 1}, {"a": None}])
def test_an_invalid_filter_is_an_error(where):
    with pytest.raises(BadSetting, match="cannot be used"):
        check_filter(where)


def test_nested_fields_are_found():
    assert get_field({"meta": {"a": {"b": 1}}, "x.y": 2}, "meta.a.b") == 1
    assert get_field({"x.y": 2}, "x.y") == 2
    assert get_field({"meta": "text"}, "meta.a") is None


@pytest.mark.parametrize("engine", ["qdrant", "chroma", "lancedb"])
def test_a_missing_collection_is_an_error(engine, tmp_path, monkeypatch):
    pytest.importorskip({"qdrant": "qdrant_client", "chroma": "chromadb"}.get(engine, engine))
    monkeypatch.setattr("knowgate.retrieval.engines.base.load_embedder", lambda spec: EMBEDDER)
    with pytest.raises(AdapterError, match="failed"):
        load_retriever(f"{engine}:{tmp_path}/nothing").search([QUERY], 1)


def kept_by_qdrant(folder):
    qdrant = pytest.importorskip("qdrant_client", reason="needs the extra qdrant")
    client = qdrant.QdrantClient(path=str(folder))
    size = qdrant.models.VectorParams(size=EMBEDDER.width, distance=qdrant.models.Distance.COSINE)
    client.create_collection("handbook", vectors_config=size)
    for number, one in enumerate(DOCUMENTS.values()):
        payload = {"body": one["text"], "team": one["team"]}
        point = qdrant.models.PointStruct(id=number, vector=vector(one["text"]), payload=payload)
        client.upsert("handbook", [point])
    client.close()


def kept_by_chroma(folder):
    chromadb = pytest.importorskip("chromadb", reason="needs the extra chroma")
    quiet = chromadb.config.Settings(anonymized_telemetry=False)
    client = chromadb.PersistentClient(str(folder), settings=quiet)
    made = client.create_collection("handbook", embedding_function=None)
    for name, one in DOCUMENTS.items():
        about = {"team": one["team"], "body": one["text"]}
        made.add(ids=[name], embeddings=[vector(one["text"])], metadatas=[about], documents=["other"])


def kept_by_lancedb(folder):
    lance = pytest.importorskip("lancedb", reason="needs the extra lancedb")
    rows = [{"body": item["text"], "team": item["team"], "vector": vector(item["text"])} for item in DOCUMENTS.values()]
    lance.connect(str(folder)).create_table("handbook", rows)


@pytest.mark.parametrize("keep", [kept_by_qdrant, kept_by_chroma, kept_by_lancedb], ids=lambda keep: keep.__name__[8:])
def test_a_local_folder_is_opened_by_spec(keep, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.retrieval.engines.base.load_embedder", lambda spec: {"hash": EMBEDDER}[spec])
    keep(tmp_path)
    spec = f"{keep.__name__[8:]}:{tmp_path}/handbook?text=body&embedder=hash&filter.team=mountain"
    (found,) = load_retriever(spec).search([QUERY], 3)
    assert [item.text for item in found] == [DOCUMENTS["stove"]["text"]]


# --- Qdrant over HTTP -----------------------------------------------------------------------------

POINT = {"id": 7, "version": 1, "score": 0.5, "payload": {"text": "Mira runs it."}}


@pytest.fixture
def qdrant_server(monkeypatch):
    remote = pytest.importorskip("qdrant_client.qdrant_remote", reason="needs the extra qdrant")
    monkeypatch.setattr(remote.QdrantRemote, "_check_compatibility", lambda *args: None, raising=False)
    monkeypatch.setattr("knowgate.retrieval.engines.base.load_embedder", lambda spec: EMBEDDER)
    monkeypatch.setenv("NO_PROXY", "*")
    with HostileServer() as running:
        running.reply = http({"time": 0.1, "status": "ok", "result": [{"points": [POINT]}]})
        yield running


def test_a_qdrant_server_is_searched(qdrant_server):
    ((passage,),) = load_retriever(f"qdrant:{qdrant_server.url}/handbook").search([QUERY], 2)
    assert (passage.id, passage.text, passage.score) == ("7", "Mira runs it.", 0.5)
    assert any(seen.startswith(b"POST /collections/handbook/points/query/batch") for seen in qdrant_server.seen)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (http(b" " * (MAX_RESPONSE_BYTES + 1)), "sent more than 16,777,216 bytes"),
        (http([0] * (MAX_VALUES + 1)), "more than 250,000 JSON values"),
        (dripping(http(b" " * 500)), "deadline|timed out|too slowly"),
    ],
)
def test_a_response_of_a_qdrant_server_is_limited(qdrant_server, reply, message):
    qdrant_server.reply = reply
    retriever = load_retriever(f"qdrant:{qdrant_server.url}/handbook")
    seconds = 0.3 if callable(reply) else 60.0
    with pytest.raises(AdapterError, match=message), request_deadline(time.monotonic() + seconds):
        retriever.search([QUERY], 2)


# --- Elasticsearch and OpenSearch over HTTP -------------------------------------------------------


def elastic(handler, **options):
    return ElasticRetriever("http://search.test:9200", "handbook", transport=httpx.MockTransport(handler), **options)


def test_a_missing_index_gives_the_message_of_the_server():
    stub = ElasticStub("elastic", "other", {})
    with pytest.raises(ServerError, match=r"status 404.*no such index \[handbook\]"):
        elastic(stub).search([QUERY], 1)


def test_the_api_key_is_sent_and_never_appears_in_errors(monkeypatch):
    monkeypatch.setenv("KNOWGATE_SEARCH_KEY", "c2VjcmV0a2V5")
    seen = []

    def refuse(request):
        seen.append(request.headers["Authorization"])
        return httpx.Response(401, json={"error": f"no such key c2VjcmV0a2V5 {request.headers['Authorization']}"})

    with pytest.raises(ServerError) as told:
        elastic(refuse).search([QUERY], 1)
    assert seen == ["ApiKey c2VjcmV0a2V5"]
    assert "c2VjcmV0a2V5" not in str(told.value)


@pytest.mark.parametrize("reply", [b"", b"<html>", b"[]", b'{"hits": {}}', b'{"hits": {"hits": [{}]}}', b"null"])
def test_a_response_in_another_format_is_an_error(reply):
    with pytest.raises(ServerError):
        elastic(lambda request: httpx.Response(200, content=reply)).search([QUERY], 1)


def test_a_question_of_many_words_is_cut_to_what_the_server_accepts():
    def limit_clauses(request):
        match = json.loads(request.content)["query"]["bool"]["must"][0]["multi_match"]
        clauses = len(match["query"].split()) * len(match["fields"])
        return httpx.Response(400 if clauses > 1024 else 200, json={"hits": {"hits": []}})

    question = " ".join(f"w{number}" for number in range(2_500))
    assert elastic(limit_clauses).search([question], 1) == [[]]


def test_partial_results_are_an_error():
    late = {"timed_out": True, "hits": {"hits": []}}
    with pytest.raises(ServerError, match="ran out of time"):
        elastic(lambda request: httpx.Response(200, json=late)).search([QUERY], 1)


@pytest.mark.parametrize(
    ("options", "message"), [({"mode": "fuzzy"}, "must be bm25 or knn"), ({"mode": "knn"}, "vector=FIELD")]
)
def test_an_invalid_mode_is_an_error(options, message):
    with pytest.raises(BadSetting, match=message):
        elastic(lambda request: httpx.Response(500), **options)


def test_a_score_that_is_not_a_number_is_unknown():
    hits = {"hits": {"hits": [{"_id": "1", "_score": "NaN", "_source": {"text": "a"}}]}}
    [[passage]] = elastic(lambda request: httpx.Response(200, json=hits)).search([QUERY], 1)
    assert passage.score is None


def test_only_the_first_of_many_hits_are_used(monkeypatch):
    monkeypatch.setattr("knowgate.retrieval.engines.elastic.MAX_PASSAGES", 3)
    hits = {"hits": {"hits": [{"_id": str(i), "_score": 1.0, "_source": {"text": "x"}} for i in range(9)]}}
    [passages] = elastic(lambda request: httpx.Response(200, json=hits)).search([QUERY], 9)
    assert [passage.id for passage in passages] == ["0", "1", "2"]


def test_specs_open_elasticsearch_and_opensearch(monkeypatch):
    assert load_retriever("elastic:http://127.0.0.1:9/i?mode=knn&vector=v").name == "elastic"
    assert load_retriever("opensearch:http://127.0.0.1:9/i").name == "opensearch"
