"""The door for logs of questions: a damaged or foreign database is refused, or read as what it says."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry, RetrievalOutcome
from knowgate.data.history.sqlite_store import SqliteHistory
from tests.support.fuzz import attempt, tries
from tests.support.hash_embedder import HashEmbedder
from tests.support.mutations import seeded

SCOPE = HistoryScope("m", "p")
VALUES: list[Any] = [None, "", "x", "known", -1, 0, 2**62, 1e300, float("inf"), b"", b"\xff\xfe", b"\x00" * 256, b"abc"]
COLUMNS = ["key", "question", "label", "outcome", "source", "weight", "model", "created", "expires", "vector"]
FOREIGN = [
    "CREATE TABLE places (url TEXT)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE entries (id INTEGER); CREATE TABLE meta (a, b)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT); CREATE TABLE entries (id INTEGER, question TEXT)",
    "CREATE VIEW entries AS SELECT 1 AS id; CREATE TABLE meta (key, value)",
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "history.db"
    store = SqliteHistory(path, HashEmbedder(16))
    kinds = list(KnowledgeLabel)
    store.add(
        [LogEntry(f"who is person {i}?", kinds[i % 3], SCOPE, outcome=list(RetrievalOutcome)[i % 3]) for i in range(20)]
    )
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # all of it in one file
    return path


def used(path: Path) -> Any:
    """Everything that is read from a log."""
    store = SqliteHistory(path, HashEmbedder(16))
    try:
        found = store.search(["who is person 3", "another"], 4, SCOPE)
        outcomes, vectors = store.outcomes(SCOPE)
        assert len(outcomes) == len(vectors)
        return found, list(store.entries()), store.scopes(), store.sample(3, SCOPE)
    finally:
        store.close()


def fresh(log: Path, place: Path) -> Path:
    for path in place.parent.iterdir():
        path.unlink()
    return Path(shutil.copy(log, place))


def test_damaged_bytes_of_a_log_are_refused_or_read(log: Path, tmp_path: Path):
    rng = random.Random(seeded(1))
    for number in range(tries(6, 120)):
        path = fresh(log, tmp_path / "history.db")
        data = bytearray(path.read_bytes())
        if number % 5 == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice([1, 5, 50, 500]) if data else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        attempt("logs of questions", "bytes", lambda path=path: used(path))


def test_rows_with_values_of_other_kinds_are_refused_or_read(log: Path, tmp_path: Path):
    rng = random.Random(seeded(2))
    for _ in range(tries(8, 150)):
        path = fresh(log, tmp_path / "history.db")
        column, value = rng.choice(COLUMNS), rng.choice(VALUES)
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA writable_schema = ON")
            db.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'entries'")
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE entries SET {column} = ? WHERE id = ?", [value, rng.randrange(1, 20)])
        attempt("logs of questions", "values in rows", lambda path=path: used(path))


@pytest.mark.parametrize("value", ["x", "", "-3", "1e9", "9" * 40])
@pytest.mark.parametrize("key", ["version", "deletions", "embedder"])
def test_what_a_log_says_of_itself_is_refused_or_read(key: str, value: str, log: Path, tmp_path: Path):
    path = fresh(log, tmp_path / "history.db")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = ?", [value, key])
    attempt("logs of questions", "values in rows", lambda: used(path))


@pytest.mark.parametrize("schema", FOREIGN)
def test_another_programs_database_is_refused_and_left_as_it_is(schema: str, tmp_path: Path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.executescript(schema)
    before = path.read_bytes()
    outcome = attempt("logs of questions", "databases of others", lambda: used(path))
    assert "cannot be used" in outcome.refusal
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("notes " * 500)
    assert "cannot be used" in attempt("logs of questions", "databases of others", lambda: used(path)).refusal
    assert path.read_text() == "notes " * 500
