"""SQLite files of the server: they carry a version, are upgraded with a backup, and files of a newer version are refused."""

from __future__ import annotations

import sqlite3
import time

import pytest

from knowgate.errors import ArtifactError
from knowgate.server.database import DECISION_MIGRATIONS, DECISION_TABLES, _to_sqlite, open_store


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
