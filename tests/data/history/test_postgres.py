"""The log in PostgreSQL: the graph under filters, what is wiped, versions, and databases that cannot be used."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psycopg
import pytest

from knowgate.core.postgres.database import PostgresDatabase
from knowgate.data.history import history_exists, open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.postgres_store import PostgresHistory
from knowgate.errors import ArtifactError, BadSetting, KnowgateError
from tests.data.history.test_entries import acknowledged_until, check_entries
from tests.support.hash_embedder import HashEmbedder
from tests.support.index_builder import wait_for_builder
from tests.support.postgres_server import postgres_server
from tests.support.processes import until

SCOPE, RARE = HistoryScope("m", "p"), HistoryScope("m", "p", "rare tenant")
PASSWORD = "hunter2-Xyzzy"


@pytest.fixture(scope="module")
def server():
    return postgres_server()


def entry(question, label=KnowledgeLabel.KNOWN, scope=SCOPE, **values):
    return LogEntry(question, label, scope, **values)


def log_at(address, **options):
    return PostgresHistory(address, HashEmbedder(), **options)


def schema_of(address):
    return address.rpartition("schema=")[2]


# --- the graph ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(server):
    """3,000 entries of one tenant and 30 of another, all far away from them."""
    address, vectors = server.address(), np.random.default_rng(0).standard_normal((3030, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [
        entry(f"question {i}", KnowledgeLabel.UNKNOWN if i % 50 == 0 else KnowledgeLabel.KNOWN) for i in range(3000)
    ]
    entries += [entry(f"rare {i}", scope=RARE) for i in range(30)]
    log = log_at(address, exact_rows=0)
    log.add(entries, vectors)
    assert log.search(["question"], 3, SCOPE)[0]  # exact, and the graph is begun
    wait_for_builder(log._hnsw)
    return address, vectors[:3000]


def test_the_hnsw_index_finds_nearly_what_exact_search_finds(crowded):
    address, vectors = crowded
    graph, exact = log_at(address, exact_rows=0), log_at(address)
    asked = [f"question {i} of many" for i in range(40)]
    pairs = zip(graph.search(asked, 10, SCOPE), exact.search(asked, 10, SCOPE), strict=True)
    shares = [len({n.question for n in found} & {n.question for n in true}) / 10 for found, true in pairs]
    assert np.mean(shares) >= 0.95
    best = vectors @ HashEmbedder().embed([asked[0]])[0]
    assert exact.search(asked[:1], 10, SCOPE)[0][0].similarity == pytest.approx(best.max(), abs=1e-5)


def test_the_hnsw_index_is_used_for_large_scopes(crowded, server):
    schema = schema_of(crowded[0])
    vector = "[" + ",".join(["0.1"] * 64) + "]"
    which = "tenant = '' AND model = 'm' AND prompts = 'p' AND label <> ALL('{}') AND (expires IS NULL OR expires > 1)"
    query = f"SELECT id, vector <#> '{vector}' AS distance FROM {schema}.entries WHERE {which} ORDER BY distance"
    assert any("by_vector" in row[0] for row in server.sql(f"EXPLAIN {query} LIMIT 28"))
    rare = query.replace("tenant = ''", "tenant = 'rare tenant'")
    assert not any("by_vector" in row[0] for row in server.sql(f"EXPLAIN {rare} LIMIT 28"))  # sorted: they are few


def test_enough_rows_are_found_despite_filters(crowded):
    """One in fifty is unknown; of the nearest 18 hardly any would pass."""
    log = log_at(crowded[0], exact_rows=0)
    for near in log.search(
        ["question one", "question two"], 10, SCOPE, (KnowledgeLabel.KNOWN, KnowledgeLabel.TIME_SENSITIVE)
    ):
        assert [n.label for n in near] == [KnowledgeLabel.UNKNOWN] * 10


def test_all_entries_of_a_small_scope_are_found(crowded):
    (near,) = log_at(crowded[0], exact_rows=0).search(["question of the crowd"], 30, RARE)
    assert len({n.question for n in near}) == 30


def test_an_interrupted_index_build_is_repeated(server):
    address = server.address()
    log = log_at(address, exact_rows=0)
    log.add([entry(f"question {i}") for i in range(20)])
    log.search(["question"], 3, SCOPE)
    wait_for_builder(log._hnsw)
    server.sql(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{schema_of(address)}.by_vector'::regclass")
    again = log_at(address, exact_rows=0)
    assert len(again.search(["question"], 3, SCOPE)[0]) == 3
    wait_for_builder(again._hnsw)
    assert server.sql(f"SELECT indisvalid FROM pg_index WHERE indexrelid = '{schema_of(address)}.by_vector'::regclass")[
        0
    ] == (True,)


def test_vectors_too_wide_for_hnsw_are_searched_exactly(server):
    server.skip_if_wide_vectors_crash()
    log = PostgresHistory(server.address(), HashEmbedder(2500), exact_rows=0)
    log.add([entry("capital of France"), entry("height of Everest")])
    assert log.search(["what is the capital of Peru"], 1, SCOPE)[0][0].question == "capital of France"
    wait_for_builder(log._hnsw)
    assert log.search(["how high is Everest"], 1, SCOPE)[0][0].question == "height of Everest"


# --- forgetting -----------------------------------------------------------------------------------


def test_forgotten_entries_leave_the_database_files(server):
    log, address = None, server.address()
    log = log_at(address)
    log.add([entry("the secret of Bertholdine"), *(entry(f"height of mountain {i}") for i in range(50))])
    log.search(["the"], 2, SCOPE)
    assert b"Bertholdine" in _bytes_of(server)
    assert log.forget(contains="SECRET") == 1
    assert b"Bertholdine" not in _bytes_of(server)
    assert len(log.search(["the secret"], 60, SCOPE)[0]) == 50


def test_entries_in_a_table_that_another_session_holds_are_erased_after_it(server, monkeypatch):
    monkeypatch.setattr(PostgresHistory, "eraser_pauses", (0.1, 0.1))
    monkeypatch.setattr(PostgresDatabase.vacuum, "__defaults__", (1,))
    address = server.address()
    log = log_at(address)
    log.add([entry("the secret of Bertholdine"), entry("the height of Everest")])
    with psycopg.connect(f"host={server.folder} user=postgres dbname=postgres") as session:
        session.execute(f"SELECT * FROM {schema_of(address)}.entries").fetchall()  # as `pg_dump` does
        assert log.forget(contains="SECRET") == 1
        assert log.has_remains
        _forget_open(address)
        assert log_at(address).has_remains  # as in another process, which also tries to erase them
        assert b"Bertholdine" in _bytes_of(server)
    until(lambda: not log.has_remains)
    assert b"Bertholdine" not in _bytes_of(server)


def _bytes_of(server) -> bytes:
    """Of all tables and graphs, as they are on disk; the write-ahead log is the server's own and is used again."""
    server.sql("CHECKPOINT")
    files = [path for path in Path(server.folder, "data", "base").rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


def test_a_large_log_is_vacuumed_with_a_warning(server, monkeypatch, caplog):
    monkeypatch.setattr("knowgate.core.postgres.database.SMALL_TABLE_BYTES", 0)
    log = log_at(server.address())
    log.add([entry("one"), entry("two")])
    assert log.forget(contains="one") == 1
    assert "At a quiet time: VACUUM FULL test_" in caplog.text


# --- versions -------------------------------------------------------------------------------------


def test_checking_for_a_log_does_not_create_it(server):
    address = server.address()
    assert not history_exists(f"history:{address}")
    log_at(address).add([entry("one")])
    assert history_exists(address)


def test_a_log_of_a_newer_knowgate_is_rejected(server):
    address = server.address()
    log_at(address).add([entry("one")])
    server.sql(f"UPDATE {schema_of(address)}.versions SET version = 7")
    _forget_open(address)
    with pytest.raises(ArtifactError, match=r"have format 7, but .* up to 1\. Update knowgate: pip"):
        log_at(address).count(SCOPE)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("ALTER TABLE {0}.entries DROP COLUMN outcome", "table 'entries' has no column 'outcome'"),
        ("DROP TABLE {0}.entries", "no table 'entries'"),
        ("DROP TABLE {0}.versions", "the table 'entries' has no recorded version"),
        ("DELETE FROM {0}.versions", "the table 'entries' has no recorded version"),
    ],
)
def test_an_incomplete_schema_is_rejected_and_not_changed(server, damage, said):
    address = server.address()
    log_at(address).add([entry("one")])
    server.sql(damage.format(schema_of(address)))
    _forget_open(address)
    with pytest.raises(ArtifactError, match=f"is inconsistent, .*{said}.*not changed\\. Restore it"):
        log_at(address).add([entry("two")])


def test_a_table_that_disappears_is_reported(server):
    address = server.address()
    log = log_at(address)
    log.add([entry("one")])
    server.sql(f"DROP TABLE {schema_of(address)}.entries")
    with pytest.raises(ArtifactError, match=r'is inconsistent.* relation "entries" does not exist'):
        log.count(SCOPE)


def _forget_open(address):
    """As a new process would: nothing is known of the schema."""
    log_at(address).close()


# --- databases that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://me:{0}@127.0.0.1:1/db", r"cannot reach the database postgresql://\*\*\*@127.0.0.1:1/db: .*"),
        (
            "postgresql://me:{0}@/db?host=/nowhere",
            "cannot reach the database .*Check the address, and",
        ),
        ("postgresql://me:{0}@host:port/db", "cannot reach"),
        ("postgresql://me:{0}/x@host:12/db", "cannot be read|cannot reach"),
        (
            "postgresql://h/db?password={0}&oops=x",
            "cannot be parsed. Write special characters in user and password as %40",
        ),
        ("postgresql://me:{0}@h/db?schema=A-b", "schema name in .* is not allowed. Use lowercase letters"),
        ("postgresql://me:{0}@h/db?schema=pg_x", "schema name in .* is not allowed"),
    ],
)
def test_an_unreachable_database_is_reported_without_its_password(address, said):
    with pytest.raises(KnowgateError, match=said) as caught:
        log_at(address.format(PASSWORD)).count(SCOPE)
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_reported_without_it(server):
    server.sql("CREATE ROLE locked LOGIN PASSWORD 'right'")
    rules = Path(server.folder, "data", "pg_hba.conf")
    before = rules.read_text()
    rules.write_text("local all locked scram-sha-256\n" + before)
    try:
        server.sql("SELECT pg_reload_conf()")
        time.sleep(0.2)
        address = server.address(user=f"locked:{PASSWORD}")
        with pytest.raises(
            KnowgateError, match=r"refused the login: .*Check the user, and the password in PGPA"
        ) as said:
            log_at(address).count(SCOPE)
        assert PASSWORD not in str(said.value)
        assert PASSWORD not in repr(open_history(address))
    finally:
        rules.write_text(before)
        server.sql("SELECT pg_reload_conf()", "DROP ROLE locked")


def test_a_database_without_pgvector_is_reported_with_advice(server):
    server.sql("DROP DATABASE IF EXISTS bare", "CREATE DATABASE bare", "CREATE ROLE plain LOGIN")
    server.sql("GRANT CREATE ON DATABASE bare TO plain")
    with pytest.raises(
        BadSetting, match=r"lacks the extension pgvector\. Creating it failed: .*: CREATE EXTENSION vector;"
    ):
        log_at(server.address(database="bare", user="plain")).count(SCOPE)


def test_missing_rights_are_reported(server):
    server.sql("CREATE ROLE guest LOGIN")
    address = server.address()
    with pytest.raises(BadSetting, match=r"this user lacks permissions .*permission denied for .*grant permissions"):
        log_at(address.replace("postgres@", "guest@")).count(SCOPE)
    log_at(address).add([entry("one")])
    with pytest.raises(BadSetting, match=r"permission denied for schema test_\d+_\d+\. Ask its owner to grant"):
        log_at(address.replace("postgres@", "guest@")).count(SCOPE)


def test_a_reader_with_rights_to_read_can_search_but_not_write(server):
    server.sql("CREATE ROLE reader LOGIN")
    address = server.address()
    log_at(address).add([entry("capital of France"), entry("capital of Peru")])
    schema = schema_of(address)
    server.sql(f"GRANT USAGE ON SCHEMA {schema} TO reader", f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader")
    log = log_at(address.replace("postgres@", "reader@"))
    assert len(log.search(["capital"], 2, SCOPE)[0]) == 2
    with pytest.raises(BadSetting, match="this user lacks permissions"):
        log.add([entry("three")])


def test_a_log_can_be_used_after_the_server_restarts(monkeypatch):
    monkeypatch.setattr("knowgate.core.postgres.database.CONNECT_TIMEOUT", 1.0)
    server = postgres_server()
    log = log_at(server.address())
    log.add([entry("one")])
    server.stop("fast")
    try:
        with pytest.raises(KnowgateError, match=r"cannot reach the database|did not answer in time"):
            log.count(SCOPE)
    finally:
        server.start()
    log.add([entry("two")])
    assert log.count(SCOPE) == 2


@pytest.mark.slow
def test_no_acknowledged_entry_is_lost_when_the_server_itself_is_killed():
    """All of its processes, in the middle of writing; what it says after its recovery counts."""
    server = postgres_server()
    address = server.address()
    said = acknowledged_until(address, lambda writers: server.kill())
    server.start()
    check_entries(address, said)
