"""Servers on several machines share one database."""

import asyncio
import json

import httpx
import psycopg
import pytest

import knowgate as kg
from knowgate.core.postgres.address import parse_database_address
from knowgate.core.postgres.database import PostgresDatabase
from knowgate.data.history import open_history
from knowgate.data.history.entries import KnowledgeLabel, LabelSource
from knowgate.server.app import create_app
from knowgate.server.auth.access_control import RateLimiter
from knowgate.server.auth.api_keys import add_key, read_keys
from knowgate.server.json_api import ApiError
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.decision_log import DecisionLog
from tests.cli.conftest import call  # noqa: F401 - a fixture
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.server.test_durability import (
    DELETIONS,
    check_that_decisions_are_written_during_a_long_deletion,
    check_that_feedback_during_a_deletion_is_not_stored,
    check_that_texts_without_decision_are_deleted,
)
from tests.server.test_learning import get_arms, wait_until
from tests.server.test_tenants import check_that_neighbor_texts_are_removed
from tests.support.invented import write_invented
from tests.support.postgres_server import postgres_server

PASSWORD = "hunter2-Xyzzy"
pytestmark = pytest.mark.process


@pytest.fixture
def many(tmp_path):
    return write_invented(tmp_path / "many", 40)


@pytest.fixture
def database():
    return postgres_server().address()


def test_servers_share_and_delete_decisions(serve, database):
    options = {"decisions": database, "keep_questions": True}
    (first, _), (second, _) = (serve(gate="always", options=options) for _ in range(2))
    id = ask(first).headers["x-knowgate-id"]
    assert httpx.get(f"{first}/v1/decisions/{id}").json()["question"] == UNKNOWN
    assert httpx.post(f"{second}/v1/feedback", json={"id": id, "rating": "up", "comment": "fine\0"}).status_code == 200
    (said,) = httpx.get(f"{first}/v1/decisions/{id}").json()["feedback"]
    assert (said["rating"], said["comment"]) == ("up", "fine\N{REPLACEMENT CHARACTER}")
    assert httpx.post(f"{second}/v1/forget", json={"question": UNKNOWN}).json()["decisions"] == 1
    assert httpx.get(f"{first}/v1/decisions/{id}").status_code == 404


def test_feedback_that_arrives_while_its_decision_is_deleted_is_not_stored(database):
    check_that_feedback_during_a_deletion_is_not_stored(database)


@DELETIONS
def test_decisions_are_written_during_a_long_deletion(database, delete, monkeypatch):
    check_that_decisions_are_written_during_a_long_deletion(database, delete, monkeypatch)


@pytest.mark.parametrize("retain_days", [7, None])
def test_feedback_and_corrections_without_decision_are_deleted(database, retain_days):
    check_that_texts_without_decision_are_deleted(database, retain_days)


def test_the_texts_of_similar_questions_are_removed_from_logs_of_earlier_versions(database):
    check_that_neighbor_texts_are_removed(database)


def test_an_alarm_of_one_server_reaches_the_other(serve, stub, database):
    options = {"decisions": database, "audit": 1.0, "audit_budget": 1000, "max_loss": 0.1}
    first, _ = serve(gate="never", options=options)
    second, _ = serve(gate="never", options={**options, "audit": 1e-9})

    def triggers_alarm():
        ask(first)
        return get_arms(first)["a"]["loss"]["alarm"]

    wait_until(triggers_alarm)

    def sees_alarm():
        ask(second)
        return get_arms(second)["a"]["loss"]["alarm"]

    wait_until(sees_alarm)
    third, _ = serve(gate="never", options=options)  # it outlives a restart, too
    assert get_arms(third)["a"]["loss"]["alarm"]


def test_the_dashboard_shows_all_servers_and_no_deleted_decisions(serve, database):
    options = {"decisions": database, "keep_questions": True}
    (first, _), (second, _) = (serve(gate="always", options=options) for _ in range(2))
    ask(first)
    ask(second, "Who is asked about elsewhere?")

    def shown(address):
        return httpx.get(f"{address}/v1/dashboard", timeout=30).json()

    wait_until(lambda: [shown(item)["figures"]["requests"] for item in (first, second)] == [{"2xx": 2}] * 2)
    assert {row["question"] for row in shown(first)["recent"]} == {UNKNOWN, "Who is asked about elsewhere?"}
    httpx.post(f"{second}/v1/forget", json={"question": UNKNOWN}, timeout=30)
    assert {row["question"] for row in shown(first)["recent"]} == {"Who is asked about elsewhere?"}


def test_servers_share_the_rate_of_a_key(tmp_path, database):
    add_key(tmp_path / "keys.json", "app", rate=2)
    (key,), now = read_keys(tmp_path / "keys.json"), [1000.0]
    limiters = [RateLimiter(tmp_path / "keys.json", lambda: now[0], database=database) for _ in range(2)]

    def admitted(limiter):
        try:
            asyncio.run(limiter.admit(key))
        except ApiError:
            return False
        return True

    assert [admitted(limiters[0]), admitted(limiters[1]), admitted(limiters[0])] == [True, True, False]
    now[0] += 61
    assert [admitted(limiters[1]), admitted(limiters[0]), admitted(limiters[1])] == [True, True, False]
    assert not (tmp_path / "keys.json.used.db").exists()
    for limiter in limiters:
        limiter.close()


def test_servers_share_the_history(serve, stub, database, monkeypatch):
    from knowgate.retrieval.embeddings import SentenceEmbedder
    from tests.support.hash_embedder import HashEmbedder

    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))
    monkeypatch.setattr(SentenceEmbedder, "fingerprint", "hash")
    options = {"decisions": database, "keep_questions": True}
    servers = [serve(gate="never", log=database, options=options) for _ in range(2)]
    for number, (address, app) in enumerate(servers):
        id = ask(address, f"What is the capital of Babako{number}land?").headers["x-knowgate-id"]
        wait_until(lambda app=app, id=id: app.state.service.recent.find(id).get("closed"))
        reply = httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}, timeout=30)
        assert reply.json()["learnt"] is True
    result = [(e.question, e.label, e.source) for e in open_history(database).entries()]  # at once: it was acknowledged
    assert sorted(result) == [
        (f"What is the capital of Babako{number}land?", KnowledgeLabel.KNOWN, LabelSource.HUMAN) for number in range(2)
    ]
    gone = httpx.post(f"{servers[0][0]}/v1/forget", json={"question": result[0][0]}, timeout=30).json()
    assert (gone["decisions"], gone["history"]) == (1, 1)


def test_a_decision_log_in_a_database_can_be_replayed(serve, invented, database, call):  # noqa: F811
    address, _ = serve(upstream=False, gate="prompt", options={"decisions": database, "keep_questions": True})
    ids = [ask(address, item.text, model="knowgate").headers["x-knowgate-id"] for item in invented.questions]
    httpx.get(f"{address}/v1/decisions/{ids[-1]}")  # what was read is written
    result = json.loads(call("replay", database, "--json", "--thresholds", "0.5,1").out)
    assert (result["questions"], result["gate"]) == (len(ids), "prompt")
    outcome = call("replay", postgres_server().address("nothing_here"), "--json")
    assert outcome.code == 1
    assert "the table `decisions` is missing" in outcome.err


def served(serve, many, place, **options):
    """Forty questions, half of which the model knows, decided by a server that keeps its log there."""
    options = {"decisions": place, "keep_questions": True, **options}
    address, _ = serve(upstream=False, gate="prompt", model=many.model, docs=many.docs, options=options)
    ids = [ask(address, item.text, model="knowgate").headers["x-knowgate-id"] for item in many.questions]
    httpx.get(f"{address}/v1/decisions/{ids[-1]}")  # what was read is written
    return address, ids


def test_the_cost_of_a_log_in_a_database_equals_that_of_a_file(serve, invented, database, tmp_path, call):  # noqa: F811
    bills = []
    for place in (str(tmp_path / "d.db"), database):
        served(serve, invented, place)
        result = json.loads(call("cost", place, "--json", "--price-search", "0.01", "--price-output-token", "1e-6").out)
        timings = dict.fromkeys(("gpu", "seconds", "decision_seconds"))  # no two runs take as long
        ways = {name: bill | timings for name, bill in result["per_question"].items()}
        bills.append((result["questions"], result["gate"], result["money"], result["break_even_search"], ways))
    assert bills[0] == bills[1]
    assert bills[1][:2] == (4, "prompt")
    assert [bills[1][-1][way]["searches"] for way in ("always", "never", "gated")] == [1.0, 0.0, 0.5]
    outcome = call("cost", postgres_server().address("nothing_here"), "--json")
    assert outcome.code == 1
    assert "the table `decisions` is missing" in outcome.err


def test_a_gate_can_be_refitted_from_a_database(serve, many, database, tmp_path, call):  # noqa: F811
    address, ids = served(serve, many, database, canary=1.0)
    gold = many.questions[1].answers[0]
    httpx.post(f"{address}/v1/feedback", json={"id": ids[1], "correction": gold}, timeout=30)
    options = ["--model", many.model, "--docs", many.docs, "--max-loss", "0.3"]
    outcome = call("refit", database, *options, "--out", "again")
    assert outcome.code == 0, outcome.err
    asked = [json.loads(line) for line in (tmp_path / "again" / "questions.jsonl").read_text().splitlines()]
    assert sorted(item["question"] for item in asked) == sorted(item.text for item in many.questions)
    assert [item["answers"] for item in asked if "answers" in item] == [[gold]]
    assert outcome.out.splitlines()[-1] == "knowgate serve --config again/knowgate.toml"


def test_refit_without_questions_reports_no_password(serve, invented, database, call):  # noqa: F811
    served(serve, invented, database, keep_questions=False)
    secret = database.replace("postgres@", f"postgres:{PASSWORD}@")
    outcome = call("refit", secret, "--docs", invented.docs, "--model", invented.model)
    assert outcome.code == 1
    assert "keep_questions=True" in outcome.err
    assert PASSWORD not in outcome.err


def test_deletions_that_another_session_keeps_from_being_erased_are_erased_later(database):
    log = DecisionLog(database, stores_questions=True)
    log.append({"id": "kg-1"}, "Who is Jane?").result(10)
    results, store = [], log._store
    address = parse_database_address(database)
    with psycopg.connect(address.conninfo) as session:
        session.execute(f"LOCK TABLE {address.schema}.decisions IN ACCESS SHARE MODE")  # a backup, for example
        results.append(log.run_blocking(lambda _: store.vacuum(["decisions", "feedback"])))
    results.append(log.run_blocking(lambda _: store.vacuum(["decisions", "feedback"])))
    log.close()
    assert results == [False, True]


def test_a_database_host_that_no_longer_answers_is_noticed_soon():
    address = "postgresql://h/db?keepalives_idle=7&application_name=mine"
    options = PostgresDatabase(parse_database_address(address))._connect_options
    assert options["tcp_user_timeout"] == "30000"
    assert options["keepalives_count"] == "3"
    assert not {"keepalives_idle", "application_name"} & options.keys()  # the address says otherwise


@pytest.mark.parametrize("address", ["postgresql://me:{0}@127.0.0.1:1/db", "postgresql://me:{0}@h/db?schema=No"])
def test_an_unusable_database_is_reported_at_startup_without_its_password(invented, stub, address):
    options = ServeOptions(upstream=stub.url, decisions=address.format(PASSWORD))
    with pytest.raises(kg.KnowgateError, match=r"cannot reach the database|schema name in .* is not allowed") as caught:
        create_app(kg.PipelineOptions(gate="always", docs=invented.docs), options)
    assert PASSWORD not in str(caught.value)
    assert PASSWORD not in repr(options)


def test_requests_of_keys_with_a_rate_are_rejected_at_once_while_the_database_is_down(
    tmp_path, database, monkeypatch, caplog
):
    monkeypatch.setattr("knowgate.server.auth.access_control.BACKOFF_SECONDS", 10_000.0)
    server = postgres_server()
    add_key(tmp_path / "keys.json", "app", rate=100)
    (key,) = read_keys(tmp_path / "keys.json")
    limiter = RateLimiter(tmp_path / "keys.json", database=database)
    asyncio.run(limiter.admit(key))
    server.stop("fast")
    try:
        for _ in range(20):
            with pytest.raises(ApiError, match="cannot count the requests") as caught:
                asyncio.run(limiter.admit(key))
            assert caught.value.status == 503
        assert (
            caplog.text.count("API keys with a rate limit are rejected") == 1
        )  # the database is left alone for a while
    finally:
        server.start()
        limiter.close()


def test_requests_are_answered_while_the_database_is_down(serve, monkeypatch):
    monkeypatch.setattr("knowgate.core.postgres.database.CONNECT_TIMEOUT", 1.0)
    server = postgres_server()
    address, _ = serve(gate="always", options={"decisions": server.address()})
    ask(address)
    server.stop("fast")
    try:
        assert ask(address).status_code == 200
        assert httpx.get(f"{address}/v1/decisions/kg-x", timeout=30).status_code == 503
    finally:
        server.start()
    id = ask(address).headers["x-knowgate-id"]
    wait_until(lambda: httpx.get(f"{address}/v1/decisions/{id}", timeout=30).status_code == 200)
