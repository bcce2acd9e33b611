"""What the decision log keeps: decisions that cannot be stored are counted, and old ones are deleted."""

import asyncio
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager

import httpx
import pytest

import knowgate.server.app as app_module
from knowgate.server import database
from knowgate.server.database import SqliteStore
from knowgate.server.json_api import ApiError
from knowgate.server.learning import audit_store
from knowgate.server.learning.audit_store import AuditRecord, AuditStore
from knowgate.server.schemas import MAX_FEEDBACK_CHARS
from knowgate.server.telemetry import decision_log, trace
from knowgate.server.telemetry.decision_log import MAX_PENDING_ROWS, DecisionLog, DecisionRow
from knowgate.server.telemetry.deletions import (
    DAY_SECONDS,
    DELETE_TEXTS,
    SELECT_UNFINDABLE,
    TABLES_WITH_TEXTS,
    delete_rows,
)
from knowgate.server.telemetry.feedback import store_feedback
from knowgate.server.telemetry.snapshot import MetricsSnapshot
from knowgate.server.telemetry.snapshot_exchange import UPSERT_SNAPSHOT
from tests.server.conftest import KNOWN
from tests.server.test_chat import ask
from tests.server.test_learning import wait_until
from tests.support.processes import PATIENCE


class FullDisk:
    """A store whose disk is full: reading works, writing fails."""

    def __init__(self, store):
        self.store = store

    def fetch_rows(self, query, values=()):
        return self.store.fetch_rows(query, values)

    @contextmanager
    def transaction(self, lock=""):
        raise sqlite3.OperationalError("database or disk is full")
        yield

    def close(self):
        self.store.close()


def fill_disk(service):
    service.decision_log._store = FullDisk(service.decision_log._store)


def test_lost_decisions_are_counted_and_shown(serve, tmp_path):
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db")}, change=fill_disk)
    assert [ask(address).status_code for _ in range(3)] == [200, 200, 200]
    wait_until(lambda: app.state.service.decision_log.lost_count == 3)
    ready = httpx.get(f"{address}/ready").json()
    assert (ready["ready"], ready["lost_decisions"]) == (True, 3)
    assert "3 decisions could not be stored" in ready["degraded"]
    assert 'knowgate_lost_decisions_total{reason="write failed"} 3.0' in httpx.get(f"{address}/metrics").text
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["lost_decisions"] == 3


def test_readiness_counts_the_decisions_that_other_workers_lost(serve, tmp_path):
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    exchange = app.state.service.snapshot_exchange
    row = ("another worker", exchange._server_id, time.time(), MetricsSnapshot(lost_decisions=4).model_dump_json())
    asyncio.run(app.state.service.decision_log.execute((UPSERT_SNAPSHOT, row)))
    assert httpx.get(f"{address}/ready").json()["lost_decisions"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_durable_server_does_not_acknowledge_what_it_cannot_store(serve, tmp_path, stream):
    options = {"decisions": str(tmp_path / "d.db"), "durable": True}
    address, app = serve(gate="never", options=options, change=fill_disk)
    reply = ask(address, stream=stream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "log_down")
    wait_until(lambda: app.state.service.active_requests.count == 0)  # when the response is sent


@pytest.mark.parametrize("stream", [False, True])
def test_responses_that_a_durable_server_does_not_send_count_as_errors_and_are_not_audited(serve, tmp_path, stream):
    options = {"decisions": str(tmp_path / "d.db"), "durable": True, "audit": 1.0, "audit_budget": 1}
    address, app = serve(gate="never", options=options, change=fill_disk)
    budget = app.state.service.learner.auditor.budget.remaining
    assert [ask(address, stream=stream).status_code for _ in range(3)] == [503] * 3
    dashboard = httpx.get(f"{address}/v1/dashboard").json()
    assert (dashboard["figures"]["requests"], dashboard["recent"]) == ({"5xx": 3}, [])
    assert app.state.service.learner.auditor.budget.remaining >= budget
    line = 'knowgate_requests_total{route="/v1/chat/completions",status="503"} 3.0'
    assert line in httpx.get(f"{address}/metrics").text


def test_a_durable_server_answers_after_the_decision_is_stored(serve, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "durable": True})
    id = ask(address).headers["x-knowgate-id"]
    with closing(sqlite3.connect(tmp_path / "d.db")) as database:
        assert database.execute("SELECT id FROM decisions").fetchall() == [(id,)]


def test_the_deadline_covers_the_wait_for_a_durable_decision(serve, tmp_path):
    options = {"decisions": str(tmp_path / "d.db"), "durable": True, "deadline": 1.0}
    address, _ = serve(gate="never", options=options)
    with closing(sqlite3.connect(tmp_path / "d.db", isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda _: ask(address), range(3)))
        assert time.monotonic() - start < 20  # without the deadline, they would wait until the database is free
        assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(503, "log_down")] * 3
        database.execute("COMMIT")
    wait_until(lambda: ask(address).status_code == 200)


def test_a_durable_response_waits_only_for_a_limited_time(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.telemetry.decision_log.MAX_COMMIT_SECONDS", 0.1)
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "durable": True})
    ends = threading.Event()
    app.state.service.decision_log._thread.submit(ends.wait, PATIENCE)
    reply = ask(address)
    ends.set()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "log_down")
    stored = httpx.get(f"{address}/v1/decisions/{reply.headers['x-knowgate-id']}").json()
    assert stored["status"] == 503  # of the response that was sent


def test_a_canceled_wait_does_not_stop_the_writer(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    log._thread.submit(time.sleep, 0.2)
    assert log.append({"id": "kg-1"}, None).cancel()
    log.run_blocking(lambda store: None)
    assert log.append({"id": "kg-2"}, None).result(timeout=10) is None
    assert log.run_blocking(lambda store: store.fetch_rows("SELECT COUNT(*) FROM decisions")) == [(2,)]
    log.close()


def test_long_questions_do_not_delay_the_decisions_of_others(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.telemetry.decision_log.MAX_COMMIT_SECONDS", 5.0)
    is_hashing, may_end = threading.Event(), threading.Event()

    def hash_slowly(text):
        if len(text) > 10_000:
            is_hashing.set()
            may_end.wait(PATIENCE)
        return text

    for module in (decision_log, trace):
        monkeypatch.setattr(module, "question_key", hash_slowly)
    options = {"decisions": str(tmp_path / "d.db"), "durable": True, "keep_questions": True}
    address, _ = serve(gate="never", options=options)
    with ThreadPoolExecutor(1) as pool:
        slow_reply = pool.submit(ask, address, "Why? " * 3_000)
        assert is_hashing.wait(PATIENCE)
        status = ask(address).status_code
        may_end.set()
        assert (status, slow_reply.result(PATIENCE).status_code) == (200, 200)


def test_feedback_that_cannot_be_stored_is_not_acknowledged(serve, tmp_path):
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    id = ask(address).headers["x-knowgate-id"]
    httpx.get(f"{address}/v1/decisions/{id}")  # waits until the decision is written
    fill_disk(app.state.service)
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).status_code == 503


def test_decisions_beyond_the_queue_are_counted_as_lost(tmp_path):
    losses = []
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False, on_loss=lambda *loss: losses.append(loss))
    log._pending = [DecisionRow("kg-0", 1.0, None, "{}", "")] * MAX_PENDING_ROWS
    commit = log.append({"id": "kg-1"}, None)
    assert (losses, log.lost_count) == ([("queue full", 1)], 1)
    assert "too many decisions" in str(commit.exception(timeout=5))
    log.close()


@pytest.fixture
def locked_log(tmp_path, monkeypatch):
    """A decision log whose file is locked by another process, and the connection that holds the lock."""
    monkeypatch.setattr(decision_log, "LOCK_TIMEOUT_SECONDS", 0.05)
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    with closing(sqlite3.connect(tmp_path / "d.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield log, other


def test_decisions_wait_while_the_log_is_locked(locked_log):
    log, other = locked_log
    error = log.append({"id": "kg-1"}, None).exception(timeout=10)
    assert "locked" in str(error)  # for a durable server, which answers 503
    other.execute("ROLLBACK")
    wait_until(lambda: log.append({"id": "kg-2"}, None).exception(timeout=10) is None)
    assert log.run_blocking(lambda store: store.fetch_rows("SELECT id FROM decisions")) == [("kg-1",), ("kg-2",)]
    assert log.lost_count == 0
    log.close()


def test_decisions_that_wait_for_a_locked_log_are_limited(locked_log, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_PENDING_ROWS", 2)
    log, other = locked_log
    first, _, third = [log.append({"id": f"kg-{number}"}, None) for number in range(3)]
    assert "locked" in str(first.exception(timeout=10))
    assert "too many decisions" in str(third.exception(timeout=10))
    assert log.lost_count == 1
    other.execute("ROLLBACK")
    count = "SELECT COUNT(*) FROM decisions"
    wait_until(lambda: log.run_blocking(lambda store: store.fetch_rows(count)) == [(2,)])
    log.close()


def test_the_memory_of_decisions_that_wait_for_a_locked_log_is_limited(locked_log, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_PENDING_BYTES", 1_000)
    log, other = locked_log
    first, second = [log.append({"id": f"kg-{number}", "reason": "x" * 1_000}, None) for number in range(2)]
    assert "locked" in str(first.exception(timeout=10))
    assert "too many decisions" in str(second.exception(timeout=10))
    assert log.lost_count == 1
    other.execute("ROLLBACK")
    wait_until(lambda: log._unwritten_bytes == 0)
    assert log.append({"id": "kg-2"}, None).result(timeout=10) is None
    assert log._unwritten_bytes == 0
    log.close()


@pytest.mark.parametrize(("pause", "expected"), [(0.0, [False, True]), (9.0, [False])])
def test_deletions_that_cannot_be_erased_are_erased_later(locked_log, monkeypatch, pause, expected):
    monkeypatch.setattr(database, "VACUUM_SECONDS", 0)
    monkeypatch.setattr(decision_log, "FIRST_PAUSE_SECONDS", pause)
    log, other = locked_log
    other.execute("ROLLBACK")
    log.append({"id": "kg-1"}, "Who is Jane?").result(10)
    assert asyncio.run(log.delete(id="kg-1")) == ["kg-1"]
    results, vacuum = [], log._store.vacuum
    log._store.vacuum = lambda tables: results.append(vacuum(tables)) or results[-1]
    other.execute("BEGIN IMMEDIATE")
    log.erase_deleted()
    log.run_blocking(lambda store: None)
    other.execute("ROLLBACK")
    for _ in range(3):
        log.erase_deleted()
        log.run_blocking(lambda store: None)
    assert results == expected
    log.close()
    assert results == [False, True]


def test_an_unavailable_log_writes_one_line_for_many_requests(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("knowgate.core.limited_log.LOG_SECONDS", 60.0)
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    log.run_blocking(lambda store: store.close())
    for _ in range(3):
        with pytest.raises(ApiError):
            asyncio.run(log.find("kg-1"))
    log.close()
    assert caplog.text.count("The decision log is unavailable") == 1


def test_a_start_reads_neither_texts_nor_labels_of_audits(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_store, "ROWS_AT_ONCE", 2)
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    for kind in ("loss", "label", "loss", "failed", "loss", "label"):
        record = AuditRecord("kg-1", "a", "scope", kind, None if kind == "failed" else 1.0, "closed", "open", "bob")
        asyncio.run(AuditStore(log).add(record))
    audits = AuditStore(log).read_all()
    monkeypatch.setattr(audit_store, "MAX_AUDITS", 3)
    newest = AuditStore(log).read_all()
    log.close()
    assert [(item.kind, item.closed, item.opened, item.owner) for item in audits] == [
        (kind, None, None, "bob") for kind in ("loss", "loss", "failed", "loss")
    ]
    assert newest == audits[1:]


def test_rows_of_earlier_versions_are_upgraded_once(tmp_path, monkeypatch):
    upgrades, upgrade = [], decision_log.upgrade_records
    monkeypatch.setattr(decision_log, "upgrade_records", lambda store: upgrades.append(store) or upgrade(store))
    for days, count in ((7, 2), (0, 2)):  # for some days, processes of an earlier version may still write
        monkeypatch.setattr(decision_log, "UPGRADE_DAYS", days)
        for _ in range(2):
            DecisionLog(str(tmp_path / "d.db"), stores_questions=False).close()
        assert len(upgrades) == count


def test_decisions_that_wait_for_a_lock_when_the_server_ends_are_tried_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "LOCK_TIMEOUT_SECONDS", 1.0)
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    with closing(sqlite3.connect(tmp_path / "d.db", isolation_level=None)) as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN IMMEDIATE")
        first = log.append({"id": "kg-1"}, None)
        end = pool.submit(log.close)
        assert "locked" in str(first.exception(timeout=10))
        other.execute("ROLLBACK")
        end.result(30)
        assert (log.lost_count, other.execute("SELECT id FROM decisions").fetchall()) == (0, [("kg-1",)])


def test_decisions_are_lost_if_the_log_is_locked_until_the_server_ends(locked_log):
    log, _ = locked_log
    log.append({"id": "kg-1"}, None)
    log.close()
    assert log.lost_count == 1


@pytest.mark.parametrize("target", [{"question": "Who is Jane?"}, {"id": "kg-1"}])
def test_a_deletion_covers_decisions_that_another_process_has_not_written_yet(tmp_path, target):
    writer, deleter = (
        DecisionLog(str(tmp_path / "log.db"), stores_questions=True, is_shared=is_shared) for is_shared in (False, True)
    )
    is_free, is_busy = threading.Event(), threading.Event()
    writer._thread.submit(lambda: is_busy.set() or is_free.wait(30))  # a slow disk
    is_busy.wait(30)
    writer.append({"id": "kg-1"}, "Who is Jane?", "alice")
    writer.append({"id": "kg-2"}, "Who is Emma?", "alice")
    writer.append({"id": "kg-3"}, "Who is Jane?", "bob")
    deleted_ids = asyncio.run(deleter.delete(owner="alice", **target))
    is_free.set()
    later = writer.append({"id": "kg-4"}, "Who is Jane?", "alice")
    later.result(30)
    assert deleted_ids == []
    assert asyncio.run(deleter.find_missing(["kg-1", "kg-2", "kg-3", "kg-4"])) == ["kg-1"]
    writer.close()
    deleter.close()


def test_a_decision_that_another_process_is_about_to_write_is_deleted_and_counted(tmp_path):
    writer, deleter = (DecisionLog(str(tmp_path / "log.db"), stores_questions=True, is_shared=True) for _ in range(2))
    writer._thread.submit(time.sleep, 0.2)
    writer.append({"id": "kg-1"}, "Who is Jane?")
    assert asyncio.run(deleter.delete(question="Who is Jane?")) == ["kg-1"]
    writer.close()
    deleter.close()


@pytest.mark.parametrize("at_the_end", [True, False])
def test_deletions_are_erased_from_the_whole_file_together_or_when_the_log_is_closed(tmp_path, monkeypatch, at_the_end):
    vacuumed = []
    monkeypatch.setattr(SqliteStore, "vacuum", lambda store, tables: vacuumed.append(tables) or True)
    log = DecisionLog(str(tmp_path / "log.db"), stores_questions=True)
    for i in range(3):
        log.append({"id": f"kg-{i}"}, f"Who is {i}?").result(30)
        assert asyncio.run(log.delete(id=f"kg-{i}")) == [f"kg-{i}"]
    assert vacuumed == []
    if not at_the_end:
        for _ in range(2):
            log.erase_deleted()
        log.run_blocking(lambda store: None)
        assert len(vacuumed) == 1
    log.close()
    assert vacuumed == [TABLES_WITH_TEXTS]


def test_a_server_erases_deletions_from_the_whole_file(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.app.ERASE_SECONDS", 0.05)
    vacuumed = threading.Event()
    monkeypatch.setattr(SqliteStore, "vacuum", lambda store, tables: vacuumed.set() or True)
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "keep_questions": True})
    id = ask(address).headers["x-knowgate-id"]
    assert not vacuumed.is_set()
    assert httpx.delete(f"{address}/v1/decisions/{id}").json()["decisions"] == 1
    assert vacuumed.wait(30)


class SlowCommit:
    """A store that does something before each commit."""

    def __init__(self, store, before_commit):
        self.store, self.before_commit = store, before_commit

    @contextmanager
    def transaction(self, lock=""):
        with self.store.transaction(lock) as transaction:
            yield transaction
            self.before_commit()

    def vacuum(self, tables):
        return self.store.vacuum(tables)


def check_that_feedback_during_a_deletion_is_not_stored(location):
    rater, deleter = (DecisionLog(location, stores_questions=True) for _ in range(2))
    rater.append({"id": "kg-1"}, "Who is Jane?").result(30)
    ratings = []

    def rate():
        ratings.append(rater._thread.submit(store_feedback, rater._store, "kg-1", "up", "a comment", "", None, 9))
        wait(ratings, timeout=0.5)  # it must not end before the deletion is committed

    deleter.run_blocking(lambda store: delete_rows(SlowCommit(store, rate), ["kg-1"]))
    assert [rating.result(30) for rating in ratings] == [False]
    assert rater.run_blocking(lambda store: store.fetch_rows("SELECT * FROM feedback")) == []
    rater.close()
    deleter.close()


def check_that_texts_without_decision_are_deleted(location, retain_days):
    log = DecisionLog(location, stores_questions=True, retain_days=retain_days)
    log.append({"id": "kg-1"}, "Who is Jane?").result(30)
    asyncio.run(log.add_feedback("kg-1", "up", "kept", correction="Emma"))
    insertions = [
        ("INSERT INTO feedback VALUES ('kg-0', ?, 'up', 'orphan', 'alice')", (time.time(),)),
        ("INSERT INTO corrections VALUES ('kg-0', ?, 'orphan')", (time.time(),)),
    ]
    asyncio.run(log.execute(*insertions))
    log.delete_expired()
    rows = log.run_blocking(lambda store: store.fetch_rows("SELECT decision, comment FROM feedback ORDER BY decision"))
    assert rows == [("", None), ("kg-1", "kept")]
    corrections = log.run_blocking(lambda store: store.fetch_rows("SELECT decision, answer FROM corrections"))
    assert corrections == [("kg-1", "Emma")]
    log.close()


def forget_jane(log):
    asyncio.run(log.delete(question="Who is Jane?"))


DELETIONS = pytest.mark.parametrize("delete", [forget_jane, DecisionLog.delete_expired])


def check_that_decisions_are_written_during_a_long_deletion(location, delete, monkeypatch):
    log = DecisionLog(location, stores_questions=True, retain_days=7)
    wait([log.append({"id": f"kg-{number}"}, "Who is Jane?", seconds=8 * DAY_SECONDS) for number in range(5)])
    commits, are_written = [], []

    def delete_batch(store, ids):
        are_written.append([commit.done() for commit in commits])
        delete_rows(store, ids)
        commits.append(log.append({"id": f"new-{len(commits)}"}, "Who is Emma?"))

    monkeypatch.setattr(decision_log, "DELETION_BATCH", 2)
    monkeypatch.setattr(decision_log, "delete_rows", delete_batch)
    delete(log)
    wait_until(lambda: len(commits) == 3 and commits[-1].done())
    rows = log.run_blocking(lambda store: store.fetch_rows("SELECT id FROM decisions ORDER BY id"))
    log.close()
    assert are_written == [[], [True], [True, True]]
    assert rows == [("new-0",), ("new-1",), ("new-2",)]


@DELETIONS
def test_decisions_are_written_during_a_long_deletion(tmp_path, delete, monkeypatch):
    check_that_decisions_are_written_during_a_long_deletion(str(tmp_path / "d.db"), delete, monkeypatch)


def test_a_deletion_goes_on_after_the_deadline_of_its_request(tmp_path, monkeypatch):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    ids = [f"kg-{number}" for number in range(5)]
    wait([log.append({"id": id}, "Who is Jane?") for id in ids])
    monkeypatch.setattr(decision_log, "DELETION_BATCH", 1)

    async def cancel_deletion():
        deletion = asyncio.create_task(log.delete(question="Who is Jane?"))
        async with asyncio.timeout(PATIENCE):
            while not await log.find_missing(ids):
                pass
            deletion.cancel()
            while await log.find_missing(ids) != ids:
                pass
        return await asyncio.gather(deletion, return_exceptions=True)

    assert [type(result) for result in asyncio.run(cancel_deletion())] == [asyncio.CancelledError]
    log.close()


def test_feedback_that_arrives_while_its_decision_is_deleted_is_not_stored(tmp_path):
    check_that_feedback_during_a_deletion_is_not_stored(str(tmp_path / "d.db"))


@pytest.mark.parametrize("retain_days", [7, None])
def test_feedback_and_corrections_without_decision_are_deleted(tmp_path, retain_days):
    check_that_texts_without_decision_are_deleted(str(tmp_path / "d.db"), retain_days)


def test_an_audit_of_a_deleted_decision_is_stored_without_its_texts(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    log.append({"id": "kg-1"}, "Who is Jane?").result(30)
    audits = AuditStore(log)
    records = [AuditRecord(id, "a", "scope", "loss", 1.0, "closed", "open") for id in ("kg-1", "kg-2")]
    for record in records:  # there is no decision kg-2
        asyncio.run(audits.add(record))
    stored = log.run_blocking(lambda store: store.fetch_rows("SELECT closed, opened FROM audits ORDER BY number"))
    log.close()
    assert stored == [("closed", "open"), (None, None)]


def test_a_correction_of_a_deleted_decision_is_not_stored(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    log.append({"id": "kg-1"}, "Who is Jane?").result(30)
    for id in ("kg-0", "kg-1"):
        asyncio.run(log.add_feedback(id, "down", None, correction="Emma"))
    rows = log.run_blocking(lambda store: store.fetch_rows("SELECT decision, answer FROM corrections"))
    assert rows == [("kg-1", "Emma")]
    log.close()


def test_old_decisions_are_deleted_with_all_their_texts(serve, tmp_path):
    file = tmp_path / "d.db"
    options = {"decisions": str(file), "keep_questions": True}
    address, _ = serve(gate="never", options=options)
    old, new = (ask(address, KNOWN).headers["x-knowgate-id"] for _ in range(2))
    httpx.post(f"{address}/v1/feedback", json={"id": old, "rating": "down", "comment": "old comment"})
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE decisions SET at = ? WHERE id = ?", (time.time() - 8 * 86_400, old))
        database.execute("UPDATE feedback SET at = ? WHERE decision = ?", (time.time() - 8 * 86_400, old))
        database.execute("INSERT INTO corrections VALUES (?, 1, 'old correction')", (old,))
        audit = "INSERT INTO audits (decision, at, arm, scope, kind, lost, closed) VALUES (?, 1, 'a', '', 'loss', 1, ?)"
        database.execute(audit, (old, "old answer"))
    address, _ = serve(gate="never", options={**options, "retain_days": 7})
    wait_until(lambda: httpx.get(f"{address}/v1/decisions/{old}").status_code == 404)
    assert httpx.get(f"{address}/v1/decisions/{new}").status_code == 200
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT decision, lost, closed FROM audits").fetchall() == [(old, 1.0, None)]
        assert database.execute("SELECT * FROM corrections").fetchall() == []
        assert database.execute("SELECT * FROM feedback").fetchall() == []


def test_an_idle_server_deletes_old_decisions_and_web_responses(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(app_module, "CLEANUP_SECONDS", 0.05)
    file, replies = tmp_path / "d.db", tmp_path / "cache" / "web" / "replies"
    index = "web:searxng@http://127.0.0.1:1?days=1"
    address, _ = serve(gate="never", docs=None, index=index, options={"decisions": str(file), "retain_days": 7})
    id = ask(address, KNOWN).headers["x-knowgate-id"]
    assert httpx.get(f"{address}/v1/decisions/{id}").status_code == 200
    replies.mkdir(parents=True)
    for name, days in {"old": 2, "new": 0}.items():
        (replies / f"{name}.json").write_text('{"at": 1, "results": []}')
        os.utime(replies / f"{name}.json", (time.time() - days * 86_400,) * 2)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE decisions SET at = ?", (time.time() - 8 * 86_400,))
    wait_until(lambda: [reply.name for reply in replies.iterdir()] == ["new.json"])
    wait_until(lambda: httpx.get(f"{address}/v1/decisions/{id}").status_code == 404)


def test_decisions_are_kept_for_thirty_days_by_default(serve, tmp_path):
    _, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    assert app.state.service.options.retain_days == 30


def test_a_correction_that_is_too_long_is_rejected_with_the_limit(serve, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    body = {"id": "kg-1", "correction": "x" * (MAX_FEEDBACK_CHARS + 1)}
    reply = httpx.post(f"{address}/v1/feedback", json=body)
    assert reply.status_code == 400
    assert f"at most {MAX_FEEDBACK_CHARS:,} characters" in reply.json()["error"]["message"]


def test_a_question_that_is_too_long_is_rejected_with_the_limit(serve):
    address, _ = serve(gate="never")
    reply = httpx.post(f"{address}/v1/forget", json={"question": "x" * 20_001})
    assert reply.status_code == 400
    assert "at most 20,000 characters" in reply.json()["error"]["message"]


def test_a_blank_correction_counts_as_none(serve, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    id = ask(address).headers["x-knowgate-id"]
    bodies = [{"correction": " 42 "}, {"correction": "  \t"}, {"correction": "   ", "rating": "up"}]
    replies = [httpx.post(f"{address}/v1/feedback", json={"id": id, **body}) for body in bodies]
    assert [reply.status_code for reply in replies] == [200, 400, 200]
    assert httpx.get(f"{address}/v1/decisions/{id}").json()["correction"] == "42"


def test_a_durable_server_does_not_acknowledge_decisions_after_its_file_was_deleted(serve, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "durable": True})
    assert ask(address).status_code == 200
    for file in tmp_path.glob("d.db*"):
        file.unlink()
    assert ask(address).status_code == 503


def test_deletions_read_no_table_as_a_whole(tmp_path):
    """With 500,000 decisions, each deletion would hold up the log."""
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    statements = [(f"{statement} decision = ?", ("kg-1",)) for statement in DELETE_TEXTS] + [(SELECT_UNFINDABLE, ())]

    def explain(store):
        return [
            row[3] for query, values in statements for row in store.fetch_rows(f"EXPLAIN QUERY PLAN {query}", values)
        ]

    steps = log.run_blocking(explain)
    log.close()
    assert any("SEARCH decisions" in step for step in steps)
    assert not [step for step in steps if step.startswith("SCAN decisions")]
    assert sum(step.startswith("SEARCH") for step in steps[:2]) == 2  # feedback and corrections
