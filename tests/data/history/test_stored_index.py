"""The faiss index stored beside a log follows deletions and restored logs."""

from __future__ import annotations

import shutil
import stat

import numpy as np
import pytest

from knowgate.data.history import vector_index
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.data.history.vector_index import VectorIndex
from tests.support.hash_embedder import HashEmbedder
from tests.support.index_builder import wait_for_builder

pytest.importorskip("faiss")
SCOPE = HistoryScope("model-a", "prompts-a")
WORDS = ["capital", "height", "author", "river", "king", "song", "year", "planet", "colour", "price"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(vector_index, "EXACT_SEARCH_ROWS", 100)
    monkeypatch.setattr(vector_index, "FRESH_ROWS", 50)


def entries(first, n):
    return [LogEntry(f"{WORDS[i % 10]} of thing {i}", KnowledgeLabel.KNOWN, SCOPE) for i in range(first, first + n)]


def build_log(path, n=400):
    log = SqliteHistory(path, HashEmbedder())
    log.add(entries(0, n))
    log.search(["begin"], 1, SCOPE)
    wait_for_builder(log._indexes[SCOPE])
    return log


def search(log, question, k=5):
    return [near.question for near in log.search([question], k, SCOPE)[0]]


def test_search_with_a_stored_index_finds_the_same_questions(tmp_path):
    log = build_log(tmp_path / "log.db")
    assert log._indexes[SCOPE].last_indexed_id == 400
    plain = SqliteHistory(tmp_path / "plain.db", HashEmbedder())
    plain.add(entries(0, 80))
    few = build_log(tmp_path / "few.db", 80)
    assert few._indexes[SCOPE].last_indexed_id == -1
    assert search(few, "river of thing") == search(plain, "river of thing")
    assert search(log, "song of thing 5 or 15", 1) in ([f"song of thing {i}"] for i in (5, 15))


def test_the_next_process_reads_only_new_rows(tmp_path, monkeypatch):
    build_log(tmp_path / "log.db").add(entries(400, 3))
    again, added = SqliteHistory(tmp_path / "log.db", HashEmbedder()), []
    monkeypatch.setattr(
        VectorIndex, "add", lambda self, ids, vectors, add=VectorIndex.add: added.extend(ids) or add(self, ids, vectors)
    )
    assert search(again, "author of thing 402 again", 1) == ["author of thing 402"]
    assert added == [401, 402, 403]


def test_forgotten_entries_leave_the_stored_index(tmp_path):
    log = build_log(tmp_path / "log.db")
    vector = HashEmbedder().embed(["planet of thing 7"])[0].astype(np.float32).tobytes()
    assert stat.S_IMODE((tmp_path / "log.db-lists").stat().st_mode) == 0o700
    (file,) = (tmp_path / "log.db-lists").glob("*.faiss")
    before = file.read_bytes().count(vector)
    assert log.forget(contains="thing 7") > 0
    (file,) = (tmp_path / "log.db-lists").glob("*.faiss")
    assert file.read_bytes().count(vector) < before
    assert "planet of thing 7" not in search(log, "the planet of thing 7", 400)
    other = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    assert len(search(other, "the planet of thing 7", 400)) == log.count(SCOPE)


def test_pruned_entries_leave_the_stored_index(tmp_path):
    log = build_log(tmp_path / "log.db")
    log.add([LogEntry(f"price of thing {i}", KnowledgeLabel.KNOWN, SCOPE, expires=1.0) for i in range(9, 400, 10)])
    assert log.prune() == 40
    assert len(SqliteHistory(tmp_path / "log.db", HashEmbedder())._create_index(SCOPE)) == 360


def test_the_index_of_a_later_state_is_ignored_after_a_log_is_restored(tmp_path):
    first = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    first.add(entries(0, 150))
    first._database.read("PRAGMA wal_checkpoint(TRUNCATE)", [])
    first.close()
    shutil.copy(tmp_path / "log.db", tmp_path / "backup.db")
    build_log(tmp_path / "log.db", 500).close()
    for left in tmp_path.glob("log.db-*"):
        if left.is_file():
            left.unlink()
    shutil.copy(tmp_path / "backup.db", tmp_path / "log.db")
    restored = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    restored.add([LogEntry("a new question about wombats", KnowledgeLabel.UNKNOWN, SCOPE)])
    assert search(restored, "question on wombats", 1) == ["a new question about wombats"]
    assert restored._indexes[SCOPE].last_indexed_id in (-1, 151)


def test_a_new_log_with_the_same_path_ignores_the_old_index(tmp_path):
    build_log(tmp_path / "log.db").close()
    for left in tmp_path.glob("log.db*"):
        if left.is_file():
            left.unlink()
    other = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    other.add([LogEntry("the only question", KnowledgeLabel.KNOWN, SCOPE)])
    assert search(other, "which question is the only one") == ["the only question"]
    assert other._indexes[SCOPE].last_indexed_id == -1
