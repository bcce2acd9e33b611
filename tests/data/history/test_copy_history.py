"""Logs copied from a file into a database and back."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.cli.main import run
from knowgate.data.history import open_history
from knowgate.data.history.entries import (
    HistoryScope,
    KnowledgeLabel,
    LabelSource,
    LogEntry,
    RetrievalOutcome,
)
from knowgate.data.history.store import copy_history
from knowgate.retrieval.embeddings import SentenceEmbedder
from tests.support.hash_embedder import HashEmbedder
from tests.support.postgres_server import postgres_server

ENTRIES = [
    LogEntry(
        "Who wrote Faust?",
        KnowledgeLabel.KNOWN,
        HistoryScope("m", "p"),
        LabelSource.HUMAN,
        RetrievalOutcome.SAME,
        0.7,
        1e9,
        4e9,
    ),
    LogEntry("Who wrote Emma?", KnowledgeLabel.UNKNOWN, HistoryScope("m", "p", "acme")),
    LogEntry("Who leads now?", KnowledgeLabel.TIME_SENSITIVE, HistoryScope("n", "q"), LabelSource.AGREEMENT),
]


class Counting(HashEmbedder):
    """Counts what it is asked to embed."""

    asked = 0

    def embed(self, texts):
        self.asked += len(texts)
        return super().embed(texts)


def plain(log):
    """All that a log says, in the order it was logged; numbers are the store's own."""
    return [(e.question, e.label, e.scope, e.source, e.outcome, e.trust, e.created, e.expires) for e in log.entries()]


@pytest.fixture
def stores(tmp_path):
    return [str(tmp_path / "log.db"), postgres_server().address(), str(tmp_path / "back.db")]


def test_a_log_goes_into_a_database_and_back_without_a_loss(stores):
    logs = [open_history(address, Counting()) for address in stores]
    logs[0].add(ENTRIES)
    assert [copy_history(logs[0], logs[1]), copy_history(logs[1], logs[2])] == [3, 3]
    assert plain(logs[0]) == plain(logs[1]) == plain(logs[2])
    vectors = [np.concatenate([vectors for _, vectors in log.batches()]) for log in logs]
    assert np.array_equal(vectors[0], vectors[1])
    assert np.array_equal(vectors[0], vectors[2])
    assert logs[1]._embedder.asked == 0


def test_a_second_copy_adds_nothing_twice(stores):
    logs = [open_history(address, HashEmbedder()) for address in stores[:2]]
    logs[0].add(ENTRIES)
    copy_history(logs[0], logs[1])
    copy_history(logs[0], logs[1])
    assert len(list(logs[1].entries())) == 3


def test_questions_are_embedded_anew_for_another_embedding(stores):
    source, target = open_history(stores[0], HashEmbedder()), open_history(stores[1], Counting(32, "other"))
    source.add(ENTRIES)
    copy_history(source, target)
    assert {len(vectors[0]) for _, vectors in target.batches()} == {32}
    assert target._embedder.asked == 3


def test_the_command_copies_and_says_so_without_the_password(stores, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    source = open_history(stores[0], str(tmp_path / "own"))
    source.add(ENTRIES)
    with_password = stores[1].replace("postgres@", "postgres:hunter2-Xyzzy@")
    assert run(["history", "copy", stores[0], f"history:{with_password}"]) == 0
    said = capsys.readouterr().err
    assert "3 entries copied into" in said.replace("\n", " ")
    assert "hunter2" not in said
    assert open_history(stores[1]).embedding_fingerprint == source.embedding_fingerprint
    assert run(["history", "stats", "--history", stores[1]]) == 0
    assert "time-sensitive" in capsys.readouterr().out


def test_a_log_is_not_copied_into_itself(stores, capsys):
    assert run(["history", "copy", stores[0], stores[0]]) == 1
    assert "name the same log" in capsys.readouterr().err
