"""API keys as tenants: what a key sees, rates and deletes, and what needs an admin key."""

import asyncio
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest

from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry, RetrievalOutcome, question_key
from knowgate.errors import KnowgateError
from knowgate.gates.skr import SkrGate
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.server.auth.api_keys import add_key
from knowgate.server.chat.gate_service import GateService
from knowgate.server.dashboard.page import list_recent_decisions
from knowgate.server.database import DECISION_TABLES, _to_sqlite
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.telemetry import decision_log
from knowgate.server.telemetry.decision_log import MAX_FEEDBACK_PER_DAY, DecisionLog
from knowgate.server.telemetry.deletions import INSERT_DELETION, SELECT_DECISIONS, find_ids
from knowgate.server.telemetry.snapshot import RecentDecisions
from knowgate.server.telemetry.snapshot_exchange import SnapshotExchange
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask
from tests.server.test_failures import use_gate_service
from tests.server.test_learning import RecordingHistory, audit_options, use_history
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import PATIENCE, until


@pytest.fixture
def tenants(serve, tmp_path):
    """A server with the keys of Alice and Carol and an admin key: (address, headers by name)."""
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, admin=name == "admin") for name in ("alice", "carol", "admin")}
    options = {"keys": str(file), "decisions": str(tmp_path / "d.db"), "keep_questions": True}
    address, _ = serve(gate="never", options=options)
    return address, {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}


def ask_as(address, headers, question=KNOWN):
    body = {"model": "m", "messages": [{"role": "user", "content": question}]}
    return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers).headers["x-knowgate-id"]


def test_a_key_sees_rates_and_deletes_only_its_own_decisions(tenants):
    address, keys = tenants
    id = ask_as(address, keys["alice"])
    url, feedback = f"{address}/v1/decisions/{id}", {"id": id, "rating": "down", "correction": "wrong"}

    def use(name):
        read = httpx.get(url, headers=keys[name])
        rate = httpx.post(f"{address}/v1/feedback", json=feedback, headers=keys[name])
        return read.status_code, rate.status_code

    assert use("carol") == (404, 404)
    assert httpx.delete(url, headers=keys["carol"]).status_code == 404
    assert use("alice") == (200, 200)
    assert use("admin") == (200, 200)
    assert httpx.delete(url, headers=keys["alice"]).json()["decisions"] == 1


def test_a_correction_is_stored_without_audits_and_shown_with_its_decision(tenants):
    address, keys = tenants
    id = ask_as(address, keys["alice"])
    for answer in ("27 days", "28 days"):
        reply = httpx.post(f"{address}/v1/feedback", json={"id": id, "correction": answer}, headers=keys["alice"])
        assert reply.json() == {"id": id, "rating": "down", "learnt": False}
    httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "down"}, headers=keys["alice"])
    stored = httpx.get(f"{address}/v1/decisions/{id}", headers=keys["alice"]).json()
    assert (stored["correction"], len(stored["feedback"])) == ("28 days", 1)


def test_a_key_forgets_a_question_for_itself_and_an_admin_key_for_all(tenants):
    address, keys = tenants
    for name in ("alice", "carol", "carol"):
        ask_as(address, keys[name])

    def forget(name):
        return httpx.post(f"{address}/v1/forget", json={"question": KNOWN}, headers=keys[name]).json()["decisions"]

    assert [forget("alice"), forget("alice"), forget("admin"), forget("carol")] == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/dashboard"), ("GET", "/v1/learning"), ("POST", "/v1/learning/clear")]
)
def test_the_data_of_all_keys_needs_an_admin_key(tenants, method, path):
    address, keys = tenants
    reply = httpx.request(method, address + path, headers=keys["alice"])
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_only")
    assert httpx.request(method, address + path, headers=keys["admin"]).status_code != 403


@pytest.mark.parametrize("headers", [{"Origin": "http://["}, {"Host": "["}])
def test_an_invalid_origin_or_host_is_a_bad_request(serve, headers):
    address, _ = serve(gate="never")
    reply = httpx.post(f"{address}/v1/chat/completions", json={}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_host")


def test_files_with_questions_or_keys_are_private(tenants, tmp_path):
    address, keys = tenants
    ask_as(address, keys["alice"])
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {"keys.json", "d.db", "d.db-wal"} <= {path.name for path in files}
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files if path.stat().st_mode & 0o077} == {}


def test_a_key_rates_a_decision_once(tenants):
    address, keys = tenants
    id = ask_as(address, keys["alice"])
    for rating in ("up", "down", "up", "down"):
        body = {"id": id, "rating": rating, "comment": "x" * 1000}
        assert httpx.post(f"{address}/v1/feedback", json=body, headers=keys["alice"]).status_code == 200
    stored = httpx.get(f"{address}/v1/decisions/{id}", headers=keys["alice"]).json()["feedback"]
    assert [entry["rating"] for entry in stored] == ["down"]


def test_the_feedback_of_a_key_is_limited_per_day(tenants, tmp_path):
    address, keys = tenants
    id = ask_as(address, keys["alice"])
    httpx.get(f"{address}/v1/decisions/{id}", headers=keys["alice"])  # waits until the decision is written
    with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
        rows = [(f"kg-{n}", time.time(), "up", None, "alice") for n in range(MAX_FEEDBACK_PER_DAY)]
        database.executemany("INSERT INTO feedback (decision, at, rating, comment, owner) VALUES (?, ?, ?, ?, ?)", rows)
    reply = httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}, headers=keys["alice"])
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_much_feedback")


def test_deleting_rated_decisions_does_not_raise_the_limit_on_feedback(tenants, tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_FEEDBACK_PER_DAY", 2)
    address, keys = tenants
    alice, ids = keys["alice"], [ask_as(address, keys["alice"], f"Who is {n}?") for n in range(3)]

    def rate(id):
        feedback = {"id": id, "rating": "down", "comment": "a secret"}
        return httpx.post(f"{address}/v1/feedback", json=feedback, headers=alice).status_code

    assert [rate(id) for id in (ids[0], ids[0], ids[1], ids[2])] == [200, 200, 200, 429]
    assert httpx.delete(f"{address}/v1/decisions/{ids[0]}", headers=alice).json()["decisions"] == 1
    assert rate(ids[2]) == 429
    httpx.delete(f"{address}/v1/decisions/{ids[1]}", headers=alice)
    assert all(b"a secret" not in file.read_bytes() for file in tmp_path.glob("d.db*"))
    with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
        database.execute("UPDATE feedback SET at = at - 90000")
    assert rate(ids[2]) == 200


def test_a_long_deletion_of_one_key_does_not_delay_those_of_others(tenants, monkeypatch):
    address, keys = tenants
    is_deleting, may_end = threading.Event(), threading.Event()
    delete = DecisionLog.delete

    async def delete_slowly_for_alice(log, **target):
        if target["owner"] == "alice":
            is_deleting.set()
            await asyncio.to_thread(may_end.wait, PATIENCE)
        return await delete(log, **target)

    def forget(name):
        return httpx.post(f"{address}/v1/forget", json={"question": KNOWN}, headers=keys[name], timeout=10).status_code

    monkeypatch.setattr(DecisionLog, "delete", delete_slowly_for_alice)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(forget, "alice")
        assert is_deleting.wait(PATIENCE)
        try:
            assert forget("carol") == 200
        finally:
            may_end.set()
        assert slow.result(PATIENCE) == 200


def test_forgetting_uses_an_index(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    query = f"EXPLAIN QUERY PLAN {SELECT_DECISIONS}"
    plan = str(log.run_blocking(lambda store: store.fetch_rows(query, ("", "key", "key"))))
    log.close()
    assert "decisions_of_question" in plan
    assert "source_questions_by_key" in plan
    assert "SCAN" not in plan


def test_questions_in_logs_of_earlier_versions_can_be_forgotten(tmp_path, serve):
    with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
        database.execute("CREATE TABLE decisions (id TEXT PRIMARY KEY, at REAL NOT NULL, question TEXT, record TEXT)")
        database.execute("CREATE TABLE feedback (decision TEXT, at REAL, rating TEXT, comment TEXT)")
        database.execute("INSERT INTO decisions VALUES ('kg-1', ?, ?, '{}')", (time.time(), KNOWN))
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    reply = httpx.post(f"{address}/v1/forget", json={"question": KNOWN.upper()})
    assert reply.json()["decisions"] == 1


def test_a_question_that_is_forgotten_while_its_request_runs_is_not_stored(tenants, stub):
    address, keys = tenants
    stub.waits_for = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(ask_as, address, keys["alice"])
        until(lambda: stub.bodies)
        reply = httpx.post(f"{address}/v1/forget", json={"question": KNOWN}, headers=keys["alice"])
        assert reply.json()["forgotten"]
        stub.waits_for.set()
        id = request.result()
    assert httpx.get(f"{address}/v1/decisions/{id}", headers=keys["alice"]).status_code == 404


FIRST, FOLLOW_UP = "Does Dr Quetzal treat leukemia?", "And how much does it cost?"


def ask_follow_up(address, headers=None):
    """Ask a follow-up, whose question is joined with the first one, and return its id."""
    chat = [("user", FIRST), ("assistant", "Yes."), ("user", FOLLOW_UP)]
    messages = [{"role": role, "content": content} for role, content in chat]
    reply = httpx.post(f"{address}/v1/chat/completions", json={"messages": messages}, headers=headers)
    return reply.headers["x-knowgate-id"]


@pytest.mark.parametrize("question", [FIRST, FOLLOW_UP, FIRST.upper(), f"{FIRST} {FOLLOW_UP}"])
def test_a_follow_up_is_forgotten_by_each_of_its_questions(tenants, tmp_path, question):
    address, keys = tenants
    id, other = ask_follow_up(address, keys["alice"]), ask_follow_up(address, keys["carol"])
    url = f"{address}/v1/decisions"
    assert httpx.get(f"{url}/{id}", headers=keys["alice"]).json()["question"] == f"{FIRST} {FOLLOW_UP}"
    reply = httpx.post(f"{address}/v1/forget", json={"question": question}, headers=keys["alice"]).json()
    assert (reply["forgotten"], reply["decisions"]) == (True, 1)
    assert httpx.get(f"{url}/{id}", headers=keys["alice"]).status_code == 404
    assert httpx.get(f"{url}/{other}", headers=keys["carol"]).json()["follow_up"] is True
    httpx.post(f"{address}/v1/forget", json={"question": question}, headers=keys["carol"])
    assert all(b"Quetzal" not in file.read_bytes() for file in tmp_path.glob("d.db*"))


def write_old_log(path, question, record="{}"):
    """Write a decision log as knowgate 0.1 did, with one decision, which may be a follow-up."""
    with closing(sqlite3.connect(path)) as database, database:
        for statement in DECISION_TABLES:
            database.execute(_to_sqlite(statement))
        database.execute("INSERT INTO decisions VALUES ('kg-1', ?, ?, ?)", (time.time(), question, record))


@pytest.mark.parametrize(
    ("question", "is_deleted"),
    [
        (FIRST.lower(), True),
        (FOLLOW_UP, True),
        ("Does Dr Quetz", False),
        ("How many?", False),
        ("treat leukemia", True),
    ],
)
def test_a_follow_up_of_an_earlier_version_is_forgotten_if_it_contains_the_question(
    serve, tmp_path, question, is_deleted
):
    write_old_log(tmp_path / "d.db", f"{FIRST} {FOLLOW_UP}")
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    reply = httpx.post(f"{address}/v1/forget", json={"question": question}).json()
    assert (reply["forgotten"], reply["decisions"]) == (True, int(is_deleted))
    assert all(is_deleted is (b"Quetzal" not in file.read_bytes()) for file in tmp_path.glob("d.db"))


def test_a_rewritten_follow_up_of_an_earlier_version_is_not_reported_as_forgotten(serve, tmp_path):
    write_old_log(
        tmp_path / "d.db", "How much does leukemia cost at Dr Quetzal?", '{"id": "kg-1", "way": "in-process"}'
    )
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "keep_questions": True})
    ask_follow_up(address)

    def forget():
        reply = httpx.post(f"{address}/v1/forget", json={"question": FIRST}).json()
        return reply["forgotten"], reply["decisions"], "earlier version" in reply.get("note", "")

    assert [forget(), forget()] == [(False, 1, True), (False, 0, True)]
    assert httpx.delete(f"{address}/v1/decisions/kg-1").json()["forgotten"]
    assert forget() == (True, 0, False)


def test_a_question_that_contains_a_forgotten_one_is_kept_if_it_is_no_follow_up(serve, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "keep_questions": True})
    id = ask_as(address, {}, f"Please tell me: {KNOWN}")
    assert httpx.post(f"{address}/v1/forget", json={"question": KNOWN}).json()["decisions"] == 0
    second, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "keep_questions": True})  # a restart
    assert httpx.post(f"{second}/v1/forget", json={"question": KNOWN}).json()["decisions"] == 0
    assert httpx.get(f"{second}/v1/decisions/{id}").status_code == 200


def test_a_follow_up_that_is_forgotten_while_it_waits_to_be_written_is_not_stored(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    asyncio.run(log.delete(question=FIRST))
    question = f"{FIRST} {FOLLOW_UP}"
    keys = [question_key(text) for text in (question, FOLLOW_UP, FIRST)]
    log.append({"id": "kg-1"}, question, seconds=1, question_keys=keys).result(30)
    assert asyncio.run(log.find_missing(["kg-1"])) == ["kg-1"]
    log.close()


def test_the_time_of_a_deletion_does_not_tell_whether_another_key_asked_the_question(tmp_path, monkeypatch):
    searches = []
    monkeypatch.setattr(decision_log, "find_ids", lambda *query: searches.append(query) or find_ids(*query))
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True, is_shared=True)
    log.append({"id": "kg-1"}, FIRST, "alice", question_keys=[question_key(FIRST)]).result(30)

    def count_searches(question):
        searches.clear()
        assert asyncio.run(log.delete(question=question, owner="bob")) == []
        return len(searches)

    assert count_searches(FIRST) == count_searches("Never asked?") > 1
    log.close()


def test_old_records_of_deletions_are_removed_some_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.telemetry.deletions.DELETION_BATCH", 10)
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    for number in range(25):
        asyncio.run(log.execute((INSERT_DELETION, [float(number), f"kg-{number}", "", "alice"])))

    def count_after_deletion():
        asyncio.run(log.delete(id="kg-x", owner="bob"))
        return log.run_blocking(lambda store: store.fetch_rows("SELECT COUNT(*) FROM deletions"))[0][0]

    assert [count_after_deletion() for _ in range(4)] == [16, 7, 3, 4]
    log.close()


def test_a_deletion_says_that_the_history_is_unavailable(serve, tmp_path, monkeypatch):
    address, app = serve(gate="never", log=str(tmp_path / "log.db"), options={"decisions": str(tmp_path / "d.db")})
    ask_as(address, {}, FIRST)

    def fail(key):
        raise KnowgateError("the database is down.")

    monkeypatch.setattr(app.state.service.gate_service.rag.log.store, "find_ids", fail)
    reply = httpx.post(f"{address}/v1/forget", json={"question": FIRST})
    assert (reply.status_code, reply.json()["forgotten"], reply.json()["decisions"]) == (200, False, 1)
    assert "history is unavailable" in reply.json()["note"]


def test_the_dashboard_of_another_worker_shows_none_of_many_deleted_decisions(tmp_path):
    async def forget():
        own, other = (DecisionLog(str(tmp_path / "d.db"), stores_questions=True, is_shared=True) for _ in range(2))
        recent = RecentDecisions(stores_texts=True)
        for i in range(80):
            record = {"id": f"kg-{i}", "retrieve": True}
            own.append(record, FIRST, "alice")
            recent.append(record, FIRST, "alice", (question_key(FIRST),))
        await own.run(lambda store: None)
        assert len(await other.delete(question=FIRST, owner="alice")) == 80
        exchange = SnapshotExchange(lambda: "{}", own)
        service = SimpleNamespace(decision_log=own, recent=recent, snapshot_exchange=exchange)
        rows = await list_recent_decisions(service, 0.0)
        own.close()
        other.close()
        return rows

    assert asyncio.run(forget()) == []


def test_a_long_question_cannot_be_forgotten(tenants):
    address, keys = tenants
    question = "a" + "\u0301\u0316" * 20_000
    reply = httpx.post(f"{address}/v1/forget", json={"question": question}, headers=keys["alice"])
    assert reply.status_code == 400


# --- labels ---------------------------------------------------------------------------------------


def serve_with_history(serve, tmp_path, **options):
    """A server with keys and a history that only records its entries: (address, app, history, headers by name)."""
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, admin=name == "admin") for name in ("alice", "admin")}
    options = {**audit_options(tmp_path), "keys": str(file), "keep_questions": True, **options}
    address, app = serve(gate="never", options=options)
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    return address, app, use_history(app), headers


@pytest.mark.parametrize(("shares", "labelers"), [(False, ["admin"]), (True, ["alice", "admin"])])
def test_only_admin_keys_label_questions_for_all_keys_unless_labels_are_shared(serve, tmp_path, shares, labelers):
    address, app, history, keys = serve_with_history(serve, tmp_path, share_labels=shares)
    learnt = []
    for count, name in enumerate(keys, 1):
        question = f"{UNKNOWN[:-1]}, {name}?"
        id = ask_as(address, keys[name], question)
        monitor = app.state.service.learner.auditor.experiment.arms["a"].monitor
        until(lambda count=count, monitor=monitor: monitor.loss.n == count)
        reply = httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}, headers=keys[name])
        learnt.append(reply.json()["learnt"])
    app.state.service.learner.labeler.history.flush()
    assert {entry.question.split(", ")[1][:-1] for entry in history.entries} == set(labelers)
    assert learnt == [name in labelers for name in keys]


@pytest.mark.parametrize("shares", [False, True])
def test_only_an_admin_key_forgets_labels(serve, tmp_path, shares):
    store = open_history(str(tmp_path / "h.db"), HashEmbedder())
    store.add([LogEntry(KNOWN, KnowledgeLabel.KNOWN, HistoryScope("m", "p"))])

    def use_log(service):
        object.__setattr__(service.gate_service.rag, "log", TrafficLog(store))

    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, admin=name == "admin") for name in ("alice", "admin")}
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    options = {"keys": str(file), "decisions": str(tmp_path / "d.db"), "keep_questions": True, "share_labels": shares}
    address, _ = serve(gate="never", options=options, change=use_log)

    def forget(name, question=KNOWN):
        reply = httpx.post(f"{address}/v1/forget", json={"question": question}, headers=headers[name]).json()
        return reply["forgotten"], reply["decisions"], reply["history"]

    id = [ask_as(address, headers["alice"], question) for question in (KNOWN, UNKNOWN, KNOWN)][-1]
    reply = httpx.delete(f"{address}/v1/decisions/{id}", headers=headers["alice"]).json()
    assert reply == {"forgotten": False, "decisions": 1, "history": 0}
    assert [forget("alice"), forget("alice", UNKNOWN)] == [(False, 1, 0), (True, 1, 0)]
    assert [entry.question for entry in store.entries()] == [KNOWN]
    assert [forget("admin"), forget("alice")] == [(True, 0, 1), (True, 0, 0)]


def test_a_deletion_waits_for_no_label_that_is_being_embedded(serve, tmp_path, monkeypatch):
    store, responds = open_history(str(tmp_path / "h.db"), HashEmbedder()), threading.Event()
    monkeypatch.setattr(store, "embed", lambda questions, embed=store.embed: (responds.wait(60), embed(questions))[1])
    log = TrafficLog(store)
    keys = {name: add_key(tmp_path / "keys.json", name, admin=name == "admin") for name in ("alice", "admin")}
    options = {"keys": str(tmp_path / "keys.json"), "decisions": str(tmp_path / "d.db"), "keep_questions": True}

    def use_log(service):
        object.__setattr__(service.gate_service.rag, "log", log)

    address, _ = serve(gate="never", options=options, change=use_log)

    def forget(name, question):
        headers = {"Authorization": f"Bearer {keys[name]}"}
        reply = httpx.post(f"{address}/v1/forget", json={"question": question}, headers=headers, timeout=20).json()
        return reply["forgotten"], reply["history"]

    scope = HistoryScope("m", "p")
    labels = [log.log_entries([LogEntry(question, KnowledgeLabel.KNOWN, scope)]) for question in (KNOWN, UNKNOWN)]
    assert [forget("alice", KNOWN), forget("admin", KNOWN), forget("alice", KNOWN)] == [
        (False, 0),
        (True, 1),
        (True, 0),
    ]
    responds.set()
    assert [label.result(20) for label in labels] == [False, True]
    assert [entry.question for entry in store.entries()] == [UNKNOWN]


def test_a_question_that_stays_in_a_write_ahead_log_is_reported_and_erased_soon(serve, tmp_path):
    store = open_history(str(tmp_path / "h.db"), HashEmbedder())
    store.add([LogEntry(KNOWN, KnowledgeLabel.KNOWN, HistoryScope("m", "p"))])

    def use_log(service):
        object.__setattr__(service.gate_service.rag, "log", TrafficLog(store))

    address, _ = serve(gate="never", change=use_log)

    def forget():
        reply = httpx.post(f"{address}/v1/forget", json={"question": KNOWN}).json()
        return reply["forgotten"], reply["history"], "still has deleted texts" in reply.get("note", "")

    def is_stored():
        return KNOWN.encode() in b"".join(file.read_bytes() for file in tmp_path.glob("h.db*"))

    with closing(sqlite3.connect(tmp_path / "h.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM entries").fetchall()
        start = time.monotonic()
        assert [forget(), forget()] == [(False, 1, True), (False, 0, True)]
        assert time.monotonic() - start < 5.0
        assert is_stored()
    until(lambda: not is_stored())
    until(lambda: forget() == (True, 0, False))


def test_a_deletion_says_if_the_history_may_hold_a_question_that_is_not_stored(serve, tmp_path):
    def use_log(service):
        object.__setattr__(service.gate_service.rag, "log", TrafficLog(RecordingHistory()))

    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")}, change=use_log)
    reply = httpx.delete(f"{address}/v1/decisions/{ask_as(address, {})}").json()
    assert reply == {"forgotten": False, "decisions": 1, "history": 0}


def test_a_model_in_this_process_labels_only_for_keys_that_share(serve, tmp_path):
    file, history = tmp_path / "keys.json", RecordingHistory()
    keys = {name: add_key(file, name, admin=name == "admin") for name in ("alice", "admin")}

    def use_log(service):
        rag = service.gate_service.rag.replace(log=TrafficLog(history, drafts=True))
        use_gate_service(service, GateService(rag, timeout=5.0, strict=False))

    address, app = serve(upstream=False, gate="always", options={"keys": str(file)}, change=use_log)
    for name, key in keys.items():
        body = {"model": "knowgate", "messages": [{"role": "user", "content": f"{UNKNOWN[:-1]}, {name}?"}]}
        reply = httpx.post(f"{address}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.json()["knowgate"]["passages"]
    app.state.service.gate_service.rag.log.flush()
    assert [entry.question for entry in history.entries] == [f"{UNKNOWN[:-1]}, admin?"]


def test_a_hanging_embedding_server_of_the_history_delays_no_other_requests_of_an_llm_in_the_process(serve, tmp_path):
    store, hangs, release = open_history(str(tmp_path / "h.db"), HashEmbedder()), [], threading.Event()
    search = store.search

    def search_or_hang(*args, **options):
        if hangs:
            hangs.append(1)
            release.wait(PATIENCE)
        return search(*args, **options)

    def use_skr(service):
        rag = service.gate_service.rag
        scope = HistoryScope(rag.model.fingerprint, rag.prompts.fingerprint)
        store.add([LogEntry(UNKNOWN, KnowledgeLabel.UNKNOWN, scope, outcome=RetrievalOutcome.BETTER)])
        use_gate_service(service, GateService(rag.replace(gate=SkrGate(store)), timeout=0.5, strict=False))

    address, _ = serve(upstream=False, gate="never", change=use_skr)
    store.search = search_or_hang
    assert ask(address, model="knowgate").json()["knowgate"]["degraded"] == []
    hangs.append(1)
    replies = [ask(address, model="knowgate").json()["knowgate"] for _ in range(3)]
    assert [(reply["retrieve"], reply["degraded"]) for reply in replies] == [(True, ["gate"])] * 3
    assert len(hangs) == 2  # the history is not searched for a while
    release.set()


@pytest.mark.parametrize("upstream", [True, False])
def test_the_texts_of_similar_questions_of_other_keys_are_not_shown_or_stored(serve, tmp_path, upstream):
    store = open_history(str(tmp_path / "h.db"), HashEmbedder())

    def use_skr(service):
        rag = service.gate_service.rag
        scope = HistoryScope(rag.model.fingerprint, rag.prompts.fingerprint)
        outcome = RetrievalOutcome.BETTER
        store.add([LogEntry("What is the secret of Bertha?", KnowledgeLabel.UNKNOWN, scope, outcome=outcome)])
        use_gate_service(service, GateService(rag.replace(gate=SkrGate(store)), timeout=5.0, strict=False))

    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True}
    address, _ = serve(upstream=upstream, gate="never", options=options, change=use_skr)
    body = {"model": "knowgate", "messages": [{"role": "user", "content": UNKNOWN}]}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=30).json()["knowgate"]
    assert answer["gate"] == "skr"
    replies = [
        answer,
        httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}).json(),
        httpx.post(f"{address}/v1/decide", json={"questions": [UNKNOWN]}).json()["decisions"][0],
        httpx.get(f"{address}/v1/decisions/{answer['id']}").json(),
        httpx.get(f"{address}/v1/dashboard").json()["recent"][0],
    ]
    assert "Bertha" not in str(replies)
    shown = {(near["label"], near["outcome"]) for reply in replies for near in reply["neighbours"]}
    assert shown == {("unknown", "better")}


def check_that_neighbor_texts_are_removed(location):
    """Open a log in which an earlier version stored the texts of similar questions."""
    neighbor = {"question": "Who is Bertha?", "label": "known", "similarity": 0.9}
    records = [{"id": f"kg-{i:04}", "neighbours": [neighbor]} for i in range(1_001)]  # more than are read at a time
    with closing(DecisionLog(location, stores_questions=True)) as log:
        for record in records:
            written = log.append(record, KNOWN)
        written.result(30)
        asyncio.run(log.execute(("DELETE FROM upgrades", ())))  # as in a log of an earlier version
    with closing(DecisionLog(location, stores_questions=True)) as log:
        stored = asyncio.run(log.list_newest(2_000, 0.0))
    assert {str(decision["neighbours"]) for decision in stored} == {"[{'label': 'known', 'similarity': 0.9}]"}
    assert {decision["question"] for decision in stored} == {KNOWN}


def test_the_texts_of_similar_questions_are_removed_from_logs_of_earlier_versions(tmp_path):
    check_that_neighbor_texts_are_removed(str(tmp_path / "d.db"))
    assert b"Bertha" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize("upstream", [True, False])
def test_follow_ups_are_not_labeled(serve, tmp_path, upstream):
    history = RecordingHistory()

    def use_log(service):
        rag = service.gate_service.rag.replace(log=TrafficLog(history, drafts=True))
        use_gate_service(service, GateService(rag, timeout=5.0, strict=False))

    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True}
    address, app = serve(upstream=upstream, gate="always", options=options, change=use_log)
    follow_up = ask_follow_up(address)
    reply = httpx.post(f"{address}/v1/feedback", json={"id": follow_up, "rating": "down"}).json()
    assert (reply["rating"], reply["learnt"]) == ("down", False)
    app.state.service.gate_service.rag.log.flush()
    assert history.entries == []


def test_drift_names_the_keys_with_far_questions():
    monitor = LossMonitor()
    for _ in range(400):
        monitor.add_distance(0.4, "alice")
        monitor.add_distance(1.5, "bob")
    drift = monitor.to_json()["drift"]
    assert (drift["drifted"], drift["keys"]) == (True, ["bob"])
