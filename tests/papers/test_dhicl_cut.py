"""The cut that a DH-ICL gate learns from its own log."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import BadSetting
from knowgate.gates.dhicl import DhiclGate
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.dhicl_tables import compute_balanced_accuracy, find_best_cut, learn_cut, summarize_cut
from tests.support.hash_embedder import HashEmbedder

KNOWN = np.array([True, True, False, False, False])


def test_needs_that_are_all_high_are_cut_where_known_and_unknown_part():
    needs = np.array([0.90, 0.92, 0.95, 0.97, 0.99])
    learned = summarize_cut(needs, KNOWN)
    assert 0.92 <= learned.cut < 0.95
    assert (learned.balanced_accuracy, learned.at_half, learned.known_share) == (1.0, 0.5, 0.4)


def test_balanced_accuracy_weighs_both_kinds_alike():
    assert compute_balanced_accuracy(np.ones(5, dtype=bool), KNOWN) == 0.5
    assert compute_balanced_accuracy(np.array([False, True, True, True, True]), KNOWN) == 0.75


def test_equal_needs_have_a_cut():
    assert find_best_cut(np.full(5, 0.8), KNOWN) == pytest.approx(0.8)


def fill(path, model, known, unknown):
    log = SqliteHistory(path, HashEmbedder())
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    labels = [KnowledgeLabel.KNOWN] * known + [KnowledgeLabel.UNKNOWN] * unknown
    log.add([LogEntry(f"Where is town {i}?", label, scope) for i, label in enumerate(labels)])
    log.add([LogEntry(f"Who rules town {i} now?", KnowledgeLabel.TIME_SENSITIVE, scope) for i in range(5)])
    return log


def test_a_cut_is_learned_from_logged_questions_that_do_not_change_with_time(tmp_path):
    model = FakeModel({f"Where is town {i}?": {"closed": "x", "known": i < 10} for i in range(40)})
    log = fill(tmp_path / "log.db", model, known=10, unknown=30)
    learned = learn_cut(DhiclGate(log, k=4), model, questions=100)
    assert learned.questions == 40
    assert learned.known_share == 0.25
    assert learned.balanced_accuracy >= learned.at_half


def test_a_log_with_hardly_any_known_question_gives_no_cut(tmp_path):
    model = FakeModel()
    log = fill(tmp_path / "log.db", model, known=2, unknown=30)
    with pytest.raises(BadSetting, match=r"2 of the .* logged questions are known"):
        learn_cut(DhiclGate(log, k=4), model)
