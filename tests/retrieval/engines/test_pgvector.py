"""The user's own table: columns, filters, fingerprints, and tables that cannot be used."""

from __future__ import annotations

import pytest

from knowgate.core.postgres.address import format_vector
from knowgate.errors import BadSetting, KnowgateError
from knowgate.retrieval import load_retriever
from knowgate.retrieval.engines.pgvector import PgvectorRetriever
from tests.support.hash_embedder import HashEmbedder
from tests.support.postgres_server import postgres_server

TEXTS = {
    "fr": "Paris is the capital of France",
    "pe": "Lima is the capital of Peru",
    "ev": "Everest is the highest mountain",
    "py": "a python is a snake",
}
COLUMNS = "&id=key&text=body&title=head&vector=vec"


@pytest.fixture(scope="module")
def server():
    server = postgres_server()
    server.sql(
        "CREATE EXTENSION IF NOT EXISTS vector",
        "CREATE SCHEMA lib",
        "CREATE TABLE lib.docs (key TEXT PRIMARY KEY, body TEXT, head TEXT, lang TEXT, year INT, vec vector(64))",
        "CREATE INDEX ON lib.docs USING hnsw (vec vector_cosine_ops)",
    )
    for number, (key, text) in enumerate(TEXTS.items()):
        server.sql(
            f"INSERT INTO lib.docs VALUES ('{key}', '{text}', 'On {key}', 'en', {2000 + number}, {vector(text)})"
        )
    server.sql("INSERT INTO lib.docs VALUES ('no vector', 'text', '', 'en', 1, NULL)")
    yield server
    server.sql("DROP SCHEMA lib CASCADE")


def vector(text):
    return f"'{format_vector(HashEmbedder().embed([text])[0])}'"


def spec(server, more=COLUMNS, table="lib.docs"):
    place = server.address().rpartition("&schema")[0]
    return f"{place}&table={table}{more}"


def retriever(server, more=COLUMNS, table="lib.docs"):
    return PgvectorRetriever(spec(server, more, table), HashEmbedder())


def test_the_nearest_rows_come_first_with_their_titles_and_cosines(server):
    (found,) = retriever(server).search(["what is the capital of Peru"], 2)
    assert [(item.id, item.title, item.text) for item in found] == [
        ("pe", "On pe", TEXTS["pe"]),
        ("fr", "On fr", TEXTS["fr"]),
    ]
    vectors = HashEmbedder().embed(["what is the capital of Peru", TEXTS["pe"]])
    assert found[0].score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


def test_each_query_gets_at_most_all_rows(server):
    found = retriever(server).search(["snake", "mountain"], 10)
    assert [row[0].id for row in found] == ["py", "ev"]
    assert [len(row) for row in found] == [4, 4]
    assert retriever(server).search([], 3) == []


@pytest.mark.parametrize("distance", ["cosine", "ip", "l2"])
def test_all_distances_rank_unit_vectors_equally(server, distance):
    (found,) = retriever(server, f"{COLUMNS}&distance={distance}").search(["capital of France"], 4)
    assert found[0].id == "fr"
    assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)


def test_filters_keep_only_matching_rows_and_still_return_k(server):
    server.sql(
        "CREATE TABLE lib.many (id INT PRIMARY KEY, text TEXT, lang TEXT, embedding vector(64))",
        f"INSERT INTO lib.many SELECT i, 'capital ' || i, CASE WHEN i % 100 = 0 THEN 'de' ELSE 'en' END, "
        f"{vector('capital of France')}::vector FROM generate_series(1, 2000) i",
        f"UPDATE lib.many SET embedding = {vector('snake')} WHERE lang = 'de'",
        "CREATE INDEX ON lib.many USING hnsw (embedding vector_cosine_ops)",
    )
    (found,) = retriever(server, "&filter.lang=de", "lib.many").search(["capital of France"], 15)
    assert len(found) == 15
    assert {int(item.id) % 100 for item in found} == {0}
    (both,) = retriever(server, "&filter.lang=de&filter.lang=en&filter.id=7", "lib.many").search(["x"], 15)
    assert [item.id for item in both] == ["7"]


def test_half_precision_vectors_are_searched(server):
    server.sql(
        "CREATE TABLE lib.halves (id TEXT, text TEXT, embedding halfvec(64))",
        f"INSERT INTO lib.halves VALUES ('a', 'snake', {vector('snake')}), ('b', 'hill', {vector('hill')})",
    )
    assert retriever(server, "", "lib.halves").search(["snake"], 1)[0][0].id == "a"


def test_the_fingerprint_changes_with_rows_texts_vectors_columns_and_filters(server):
    server.sql("DROP TABLE IF EXISTS lib.own", "CREATE TABLE lib.own AS SELECT * FROM lib.docs")
    seen = [retriever(server, table="lib.own").fingerprint]
    assert retriever(server, table="lib.own").fingerprint == seen[0]
    for change in (
        "UPDATE lib.own SET body = 'a boa is a snake' WHERE key = 'py'",
        f"UPDATE lib.own SET vec = {vector('boa')} WHERE key = 'py'",
        "DELETE FROM lib.own WHERE key = 'ev'",
    ):
        server.sql(change)
        seen.append(retriever(server, table="lib.own").fingerprint)
    seen.append(retriever(server, COLUMNS.replace("head", "lang"), "lib.own").fingerprint)
    seen.append(retriever(server, f"{COLUMNS}&filter.key=fr", "lib.own").fingerprint)
    assert len(set(seen)) == 6


def test_a_version_replaces_the_content_in_the_fingerprint(server):
    before = retriever(server, f"{COLUMNS}&version=1").fingerprint
    server.sql("INSERT INTO lib.docs SELECT 'new', body, head, lang, year, vec FROM lib.docs WHERE key = 'py'")
    try:
        assert retriever(server, f"{COLUMNS}&version=1").fingerprint == before
        assert retriever(server, f"{COLUMNS}&version=2").fingerprint != before
    finally:
        server.sql("DELETE FROM lib.docs WHERE key = 'new'")


@pytest.mark.parametrize(
    ("table", "more", "message"),
    [
        ("lib.none", "", r"no table 'lib\.none' in .*table=SCHEMA\.TABLE"),
        ("lib.docs", "&id=key&vector=vec", r"no column 'text'\. Its columns are: key, body, head, lang, year, vec"),
        ("lib.docs", "&id=key&text=body&vector=lang", "has the type text instead of vector or halfvec"),
        ("lib.docs", f"{COLUMNS}&filter.none=1", "no column 'none'"),
        ("lib.docs", f"{COLUMNS}&distance=far", "must be one of cosine, ip, l2"),
        ("lib.docs;drop", "", "Only letters, digits and underscores"),
        ("lib.docs", "&text=a%22b", "Only letters, digits and underscores"),
        ("a.b.c", "", r"Write TABLE or SCHEMA\.TABLE"),
    ],
)
def test_an_unusable_table_is_explained(server, table, more, message):
    with pytest.raises(BadSetting, match=message):
        retriever(server, more, table).search(["x"], 1)


def test_vectors_of_another_embedding_model_are_an_error(server):
    with pytest.raises(
        BadSetting, match=r"holds vectors of 64 numbers\. The embedding model 'minilm' returns vectors of 32"
    ):
        PgvectorRetriever(spec(server), HashEmbedder(32)).search(["x"], 1)


def test_a_password_never_appears_in_errors(server):
    with pytest.raises(KnowgateError, match="does not name a table") as caught:
        load_retriever("pgvector:postgresql://me:hunter2-Xyzzy@h/db?text=body")
    assert "hunter2" not in str(caught.value)
    there = load_retriever("pgvector:postgresql://me:hunter2-Xyzzy@127.0.0.1:1/db?table=docs")
    with pytest.raises(KnowgateError, match="cannot reach the database") as caught:
        there.search(["x"], 1)
    assert "hunter2" not in str(caught.value)


def test_a_question_is_answered_from_the_table(server, tmp_path, monkeypatch, capsys):
    from knowgate.cli.main import run
    from knowgate.retrieval.embeddings import SentenceEmbedder

    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))
    monkeypatch.setattr(SentenceEmbedder, "fingerprint", "hash")
    words = ["ask", "What is the capital of Peru?", "--model", "fake", "--gate", "always", "--k", "1", "--json"]
    assert run([*words, "--index", f"pgvector:{spec(server)}"]) == 0
    assert TEXTS["pe"] in capsys.readouterr().out
