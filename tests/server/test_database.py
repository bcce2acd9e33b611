"""SQLite files of the server: they carry a version, are upgraded with a backup, and files of a newer version are refused."""

from __future__ import annotations

import random
import sqlite3
import time

import pytest

from knowgate.errors import ArtifactError
from knowgate.server.database import DECISION_MIGRATIONS, DECISION_TABLES, _to_sqlite, open_store
from knowgate.server.telemetry.deletions import TABLES_WITH_TEXTS, delete_rows


def open_log(path):
    return open_store(str(path), DECISION_MIGRATIONS, lock_timeout=1.0, is_durable=False)


def write_first_version(path):
    """A file as knowgate 0.1 wrote it, with one decision."""
    with sqlite3.connect(path) as connection:
        connection.executescript(";\n".join(_to_sqlite(statement) for statement in DECISION_TABLES))
        connection.execute("INSERT INTO decisions VALUES ('d1', 1.0, 'Who?', '{}')")
    connection.close()


def read_version(path):
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA user_version").fetchone()[0]
    finally:
        connection.close()


def test_a_new_file_has_the_latest_version_and_no_backup(tmp_path):
    open_log(tmp_path / "log.db").close()
    assert read_version(tmp_path / "log.db") == len(DECISION_MIGRATIONS)
    assert not list(tmp_path.glob("*.backup*"))


def test_a_file_of_the_first_version_is_upgraded_and_backed_up(tmp_path):
    path = tmp_path / "log.db"
    write_first_version(path)
    store = open_log(path)
    assert store.fetch_rows("SELECT id, question, owner FROM decisions") == [("d1", "Who?", None)]
    store.close()
    backup = tmp_path / "log.db.backup-v1"
    assert backup.stat().st_mode & 0o077 == 0
    connection = sqlite3.connect(backup)
    assert connection.execute("SELECT * FROM decisions").fetchall() == [("d1", 1.0, "Who?", "{}")]
    connection.close()
    open_log(path).close()  # the second time nothing is left to do
    assert len(list(tmp_path.glob("*.backup*"))) == 1


def test_a_file_of_a_newer_version_is_refused_and_not_changed(tmp_path):
    path = tmp_path / "log.db"
    open_log(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(
        ArtifactError, match=r"made by a newer version of knowgate. It has format 99, but this version reads at most"
    ):
        open_log(path)
    assert read_version(path) == 99


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "log.db"
    write_first_version(path)
    with pytest.raises(sqlite3.OperationalError):
        open_store(
            str(path),
            (*DECISION_MIGRATIONS, ("ALTER TABLE missing ADD COLUMN x TEXT",)),
            lock_timeout=1.0,
            is_durable=False,
        )
    connection = sqlite3.connect(path)
    assert "owner" not in {row[1] for row in connection.execute("PRAGMA table_info(decisions)")}
    connection.close()


@pytest.mark.parametrize(("is_durable", "level"), [(True, 2), (False, 1)])
def test_only_durable_commits_wait_for_the_disk(tmp_path, is_durable, level):
    store = open_store(str(tmp_path / "log.db"), DECISION_MIGRATIONS, lock_timeout=1.0, is_durable=is_durable)
    assert store.fetch_rows("PRAGMA synchronous") == [(level,)]
    store.close()


def test_a_reader_of_the_file_does_not_delay_deletions_and_the_log_is_truncated_after_it(tmp_path):
    path = tmp_path / "log.db"
    log_file = path.with_name("log.db-wal")
    store = open_log(path)
    with store.transaction() as transaction:
        transaction.execute("INSERT INTO decisions (id, at, question, record) VALUES ('d1', 1.0, 'Secret?', '{}')")
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM decisions").fetchone() == (1,)
    with store.transaction() as transaction:
        transaction.execute("DELETE FROM decisions")
    start = time.monotonic()
    store.vacuum(["decisions"])
    assert time.monotonic() - start < 0.9  # the lock timeout is 1 s
    assert b"Secret?" in log_file.read_bytes()
    reader.close()
    with store.transaction() as transaction:
        transaction.execute("INSERT INTO decisions (id, at, question, record) VALUES ('d2', 2.0, 'Other?', '{}')")
    assert b"Secret?" not in log_file.read_bytes()
    assert b"Secret?" not in path.read_bytes()
    store.close()


INSERT_DECISION = "INSERT INTO decisions (id, at, question, record) VALUES (?, ?, ?, '{}')"


def write_and_delete_decisions(path, seed):
    """Open a log, write 250 decisions and delete half of them one by one. Return the log and the deleted questions."""
    generator = random.Random(seed)
    questions = {f"d{i}": f"Secret {i:03}? {'x' * generator.randint(300, 700)}" for i in range(250)}
    store = open_log(path)
    for id, question in questions.items():
        with store.transaction() as transaction:
            transaction.execute(INSERT_DECISION, (id, 1.0, question))
    deleted = [id for id in questions if generator.random() < 0.5]
    for id in deleted:
        delete_rows(store, [id])
    return store, [questions[id][:11].encode() for id in deleted]


def count_remains(path, texts):
    content = path.read_bytes() + path.with_name(f"{path.name}-wal").read_bytes()
    return sum(text in content for text in texts)


def test_copies_of_rows_that_sqlite_leaves_in_unused_parts_of_the_file_are_erased(tmp_path):
    remains = []
    for seed in range(20):
        store, texts = write_and_delete_decisions(tmp_path / f"{seed}.db", seed)
        store.fetch_rows("PRAGMA wal_checkpoint(TRUNCATE)")
        remains.append(count_remains(tmp_path / f"{seed}.db", texts))
        store.vacuum(TABLES_WITH_TEXTS)
        assert count_remains(tmp_path / f"{seed}.db", texts) == 0
        store.close()
    assert any(remains)  # otherwise the test proves nothing


def test_a_file_that_cannot_be_rewritten_is_named_in_the_log(tmp_path, monkeypatch, caplog):
    store, texts = write_and_delete_decisions(tmp_path / "log.db", 0)
    writer = sqlite3.connect(tmp_path / "log.db")
    writer.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("knowgate.server.database.VACUUM_SECONDS", 0)
    assert not store.vacuum(TABLES_WITH_TEXTS)
    assert "log.db may hold copies of deleted rows for now: database is locked" in caplog.text
    writer.close()
    monkeypatch.setattr("knowgate.server.database.SMALL_FILE_BYTES", 0)
    assert store.vacuum(TABLES_WITH_TEXTS)  # another attempt would be of no use
    assert "log.db may hold copies of deleted rows. At a quiet time: sqlite3 FILE VACUUM" in caplog.text
    assert count_remains(tmp_path / "log.db", texts) <= 1  # at most a copy in an unused part
    store.close()
