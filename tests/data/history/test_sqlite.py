"""The log in a file: what stands in it, and what befalls files. All that stores share is tested in test_entries.py."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.sqlite_store import SqliteDatabase, SqliteHistory, _enable_wal
from knowgate.errors import ArtifactError, KnowgateError, ModelError
from tests.support.hash_embedder import HashEmbedder
from tests.support.hostile_server import HostileServer, http

SCOPE = HistoryScope("model-a", "prompts-a")


@pytest.fixture
def log(tmp_path):
    return SqliteHistory(tmp_path / "log.db", HashEmbedder())


def entry(question, label=KnowledgeLabel.KNOWN, scope=SCOPE, **values):
    return LogEntry(question, label, scope, **values)


def test_forgotten_questions_leave_the_table_the_index_and_the_file(log):
    log.add([entry("the secret of Bertha"), entry("the height of Everest")])
    log.search(["the"], 2, SCOPE)
    assert log.forget(contains="SECRET") == 1
    assert [n.question for n in log.search(["the secret"], 5, SCOPE)[0]] == ["the height of Everest"]
    log.close()
    assert b"Bertha" not in b"".join(path.read_bytes() for path in log.path.parent.iterdir())


def test_forgotten_questions_leave_the_files_while_the_log_stays_open(log):
    log.add([entry("the secret of Bertha"), entry("the height of Everest")])
    log.forget(contains="secret")
    files = b"".join(path.read_bytes() for path in log.path.parent.iterdir())  # with the write-ahead log
    assert b"Everest" in files
    assert b"Bertha" not in files
    log.close()


def test_a_log_is_erased_when_it_is_opened_after_its_process_ended(log):
    log.add([entry("the secret of Bertha"), entry("the height of Everest")])
    with closing(sqlite3.connect(log.path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM entries").fetchall()
        log._eraser = threading.current_thread()  # as after the end of the process, nobody tries again
        log.forget(contains="secret")
    files = list(log.path.parent.glob("log.db*"))
    assert b"Bertha" in b"".join(path.read_bytes() for path in files)
    other = SqliteHistory(log.path, HashEmbedder())
    assert [row.question for row in other.entries()] == ["the height of Everest"]
    assert b"Bertha" not in b"".join(path.read_bytes() for path in files)
    other.close()
    log.close()


def test_expired_questions_leave_the_files_when_they_are_pruned(log):
    log.add([replace(entry("the secret of Bertha"), expires=1.0), entry("the height of Everest")])
    assert log.prune() == 1
    files = b"".join(path.read_bytes() for path in log.path.parent.iterdir())
    assert b"Everest" in files
    assert b"Bertha" not in files
    log.close()


def test_a_broken_file_is_rejected_and_not_changed(tmp_path):
    path = tmp_path / "log.db"
    path.write_bytes(b"this is no database, but somebody may want it back" * 50)
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="The file was not changed"):
        SqliteHistory(path, HashEmbedder()).add([entry("one")])
    assert path.read_bytes() == before


def test_a_log_of_another_version_is_rejected(log):
    log.add([entry("one")])
    log._database.connection().execute("UPDATE meta SET value = '9' WHERE key = 'version'")
    log.close()
    with pytest.raises(ArtifactError, match="format 9"):
        list(SqliteHistory(log.path, HashEmbedder()).entries())


def test_a_full_disk_says_what_is_safe_and_what_to_do(log):
    log.add([entry("one")])
    log._database.connection().execute("PRAGMA max_page_count = 1")
    with pytest.raises(
        KnowgateError, match=r"database or disk is full. Earlier entries are saved. Free some disk space"
    ):
        log.add([entry(f"question {i} " + "x" * 3000) for i in range(50)])
    assert [one.question for one in log.entries()] == ["one"]


def test_threads_can_create_the_same_file_at_once(tmp_path):
    for number in range(30):
        database = SqliteDatabase(tmp_path / f"{number}.db")
        start = threading.Barrier(6)

        def connect(database=database, start=start):
            start.wait()
            database.connection()
            database.close()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(connect) for _ in range(6)]:
                done.result()


def test_a_log_can_be_embedded_by_a_server(tmp_path):
    with HostileServer() as server:
        server.reply = http({"data": [{"index": 0, "embedding": [3.0, 4.0]}]})
        created = SqliteHistory(tmp_path / "log.db", f"openai:my-embedder@{server.url}/v1")
        created.add([entry("Who wrote Emma?")])
        reopened = SqliteHistory(tmp_path / "log.db")  # the log knows its embedding
        assert reopened.embed(["Who wrote it?"]).tolist() == [pytest.approx([0.6, 0.8])]
        assert b"my-embedder" in server.seen[-1]


def test_a_transaction_locks_the_file_from_its_beginning(tmp_path):
    database = SqliteDatabase(tmp_path / "log.db")
    other = sqlite3.connect(tmp_path / "log.db", timeout=0, isolation_level=None)
    with database.transaction(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.close()
    database.close()


class BusyOnce:
    """A connection that is busy the first time, as SQLite is while another one switches to WAL mode."""

    def __init__(self):
        self.n_calls = 0

    def execute(self, statement):
        self.n_calls += 1
        if self.n_calls == 1:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error


def test_switching_to_wal_mode_is_tried_again_while_the_file_is_busy():
    connection = BusyOnce()
    _enable_wal(connection)
    assert connection.n_calls == 2


def test_a_vector_of_another_length_is_rejected_and_leaves_the_log_usable(log):
    log.add([entry("the height of Everest")])
    vectors = log.embed(["the secret of Bertha"])
    with pytest.raises(ModelError, match="vectors of a new length"):
        log.add([entry("the secret of Bertha")], vectors[:, :-1])
    assert [neighbor.question for neighbor in log.search(["Everest"], 5, SCOPE)[0]] == ["the height of Everest"]
