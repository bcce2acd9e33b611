"""Lists of near questions beside a log: followed, forgotten and restored with it."""

from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest

from knowgate.data.history import sqlite_store as sqlite
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.inverted_file import VectorRows, open_inverted_file, write_inverted_file
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.data.history.vector_index import VectorIndex
from tests.support.hash_embedder import HashEmbedder

SCOPE = HistoryScope("model-a", "prompts-a")
WORDS = ["capital", "height", "author", "river", "king", "song", "year", "planet", "colour", "price"]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    small = functools.partial(VectorIndex, exact_rows=100, fresh_rows=50)
    monkeypatch.setattr(sqlite, "VectorIndex", small)


def entries(first, n):
    return [LogEntry(f"{WORDS[i % 10]} of thing {i}", KnowledgeLabel.KNOWN, SCOPE) for i in range(first, first + n)]


def listed(path, n=400):
    log = SqliteHistory(path, HashEmbedder())
    log.add(entries(0, n))
    log.search(["begin"], 1, SCOPE)
    log._followed[SCOPE].index.wait()
    return log


def found(log, question, k=5):
    return [near.question for near in log.search([question], k, SCOPE)[0]]


def test_search_from_lists_is_that_of_a_log_that_has_none(tmp_path):
    log = listed(tmp_path / "log.db")
    assert log._followed[SCOPE].index.listed == 400
    plain = SqliteHistory(tmp_path / "plain.db", HashEmbedder())
    plain.add(entries(0, 80))
    few = listed(tmp_path / "few.db", 80)
    assert few._followed[SCOPE].index.listed == -1
    assert found(few, "river of thing") == found(plain, "river of thing")
    assert found(log, "song of thing 5 or 15", 1) in ([f"song of thing {i}"] for i in (5, 15))


def test_the_next_process_reads_only_what_came_since(tmp_path, monkeypatch):
    listed(tmp_path / "log.db").add(entries(400, 3))
    again, added = SqliteHistory(tmp_path / "log.db", HashEmbedder()), []
    monkeypatch.setattr(
        VectorIndex, "add", lambda self, ids, vectors, add=VectorIndex.add: added.extend(ids) or add(self, ids, vectors)
    )
    assert found(again, "author of thing 402 again", 1) == ["author of thing 402"]
    assert added == [401, 402, 403]


def test_what_is_forgotten_leaves_the_lists(tmp_path):
    log = listed(tmp_path / "log.db")
    vector = HashEmbedder().embed(["planet of thing 7"])[0]
    (file,) = (tmp_path / "log.db-lists").glob("*.vectors.npy")
    before = int((np.load(file) == vector).all(axis=1).sum())
    assert log.forget(contains="thing 7") > 0
    assert "planet of thing 7" not in found(log, "the planet of thing 7", 400)
    assert int((np.load(file) == vector).all(axis=1).sum()) < before
    other = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    assert len(found(other, "the planet of thing 7", 400)) == log.count(SCOPE)


def test_pruning_leaves_the_lists_too(tmp_path):
    log = listed(tmp_path / "log.db")
    log.add([LogEntry(f"price of thing {i}", KnowledgeLabel.KNOWN, SCOPE, expires=1.0) for i in range(9, 400, 10)])
    assert log.prune() == 40
    (file,) = (tmp_path / "log.db-lists").glob("*.ids.npy")
    assert int((np.load(file) == -1).sum()) == 40


def test_lists_of_a_later_state_than_a_restored_log_count_for_nothing(tmp_path):
    first = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    first.add(entries(0, 150))
    first._db.read("PRAGMA wal_checkpoint(TRUNCATE)", [])
    first.close()
    shutil.copy(tmp_path / "log.db", tmp_path / "backup.db")
    listed(tmp_path / "log.db", 500).close()
    for left in tmp_path.glob("log.db-*"):
        if left.is_file():
            left.unlink()
    shutil.copy(tmp_path / "backup.db", tmp_path / "log.db")
    restored = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    restored.add([LogEntry("a new question about wombats", KnowledgeLabel.UNKNOWN, SCOPE)])
    assert found(restored, "question on wombats", 1) == ["a new question about wombats"]
    assert restored._followed[SCOPE].index.listed in (-1, 151)


def test_a_log_put_in_the_place_of_another_does_not_read_its_lists(tmp_path):
    listed(tmp_path / "log.db").close()
    for left in tmp_path.glob("log.db*"):
        if left.is_file():
            left.unlink()
    other = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    other.add([LogEntry("the only question", KnowledgeLabel.KNOWN, SCOPE)])
    assert found(other, "which question is the only one") == ["the only question"]
    assert other._followed[SCOPE].index.listed == -1


def test_centres_are_found_anew_when_there_are_four_times_as_many_rows(tmp_path):
    dice = np.random.default_rng(0)

    def rows(first, n):
        vectors = dice.standard_normal((n, 8)).astype(np.float32)
        return VectorRows(np.arange(first, first + n), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    sizes = []
    for first, n in ((0, 100), (100, 250), (350, 250)):
        old = open_inverted_file(tmp_path, "x", 8, "s")
        write_inverted_file(tmp_path, "x", "s", [old.rows(), rows(first, n)] if old else [rows(first, n)], old)
        now = open_inverted_file(tmp_path, "x", 8, "s")
        sizes.append((len(now), len(now.centres), sorted(now.ids.tolist()) == list(range(first + n))))
    assert sizes == [(100, 20, True), (350, 20, True), (600, 49, True)]
