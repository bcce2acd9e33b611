"""SKR: votes of the nearest logged questions, by hand."""

import time

import numpy as np
import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry, RetrievalOutcome
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import BadSetting
from knowgate.gates.scoring import bind_gate
from knowgate.gates.skr import SkrGate, fit_logistic, majority_vote, smooth_vote
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Neighbor, Question, Reading
from tests.support.hash_embedder import HashEmbedder


def near(*outcomes, similarity=1.0, weight=1.0):
    return tuple(Neighbor("q", "known", similarity, outcome, weight=weight) for outcome in outcomes)


def test_the_majority_decides():
    assert majority_vote(near("better", "better", "worse")) == 1.0
    assert majority_vote(near("better", "worse", "worse")) == 0.0


def test_a_tie_or_no_neighbors_retrieve():
    assert majority_vote(near("better", "worse")) > SkrGate().threshold
    assert majority_vote(()) > SkrGate().threshold
    assert smooth_vote(()) > SkrGate().threshold


def test_the_smooth_vote_worked_out_by_hand():
    # two votes of 0.8 for, one of 0.8 against, prior 0.5 + 0.5: (1.6 + 0.5) / (2.4 + 1)
    assert smooth_vote(near("better", "better", "worse", similarity=0.8)) == pytest.approx(2.1 / 3.4)


def test_less_trusted_labels_count_less():
    sure, weak = near("better"), near("better", weight=0.5)
    assert smooth_vote(sure) == pytest.approx(1.5 / 2)
    assert smooth_vote(weak) == pytest.approx(1.0 / 1.5)


def test_neighbors_without_a_change_are_left_out(tmp_path):
    model = FakeModel()
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    outcomes = [RetrievalOutcome.SAME, RetrievalOutcome.BETTER, RetrievalOutcome.WORSE, None]
    log.add([LogEntry(f"town {i}", KnowledgeLabel.KNOWN, scope, outcome=outcomes[i % 4]) for i in range(40)])
    gate = bind_gate(SkrGate(log, k=6), model, AnswerPrompts())
    (found,) = gate.find_neighbors([Question("which town")])
    assert len(found) == 6
    assert {n.outcome for n in found} <= {RetrievalOutcome.BETTER, RetrievalOutcome.WORSE}


def test_k_must_be_positive():
    with pytest.raises(BadSetting, match="at least 1"):
        SkrGate(k=0)


def test_the_classifier_learns_a_planted_rule(tmp_path):
    model = FakeModel()
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    log.add(
        [
            LogEntry(f"river number {i}", KnowledgeLabel.UNKNOWN, scope, outcome=RetrievalOutcome.BETTER)
            for i in range(30)
        ]
    )
    log.add(
        [
            LogEntry(f"mountain number {i}", KnowledgeLabel.KNOWN, scope, outcome=RetrievalOutcome.WORSE)
            for i in range(30)
        ]
    )
    gate = bind_gate(SkrGate(log, mode="classifier"), model, AnswerPrompts())
    questions = [Question("river number 99"), Question("mountain number 99")]
    river, mountain = gate.score(questions, [Reading(), Reading()])
    assert river > 0.8
    assert mountain < 0.2


def test_expired_entries_do_not_train_the_classifier(tmp_path):
    model = FakeModel()
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    better, worse = ({"outcome": outcome} for outcome in (RetrievalOutcome.BETTER, RetrievalOutcome.WORSE))
    log.add([LogEntry(f"river number {i}", KnowledgeLabel.UNKNOWN, scope, **better, expires=1.0) for i in range(30)])
    log.add(
        [
            LogEntry(f"lake number {i}", KnowledgeLabel.UNKNOWN, scope, **better, expires=time.time() + 600)
            for i in range(9)
        ]
    )
    log.add([LogEntry(f"mountain number {i}", KnowledgeLabel.KNOWN, scope, **worse) for i in range(9)])
    outcomes, vectors = log.outcomes(scope)
    assert (outcomes.count(RetrievalOutcome.BETTER), outcomes.count(RetrievalOutcome.WORSE), len(vectors)) == (9, 9, 18)


def test_a_classifier_with_one_outcome_only_is_rejected_with_the_counts(tmp_path):
    model = FakeModel()
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = HistoryScope(model.fingerprint, AnswerPrompts().fingerprint)
    log.add([LogEntry(f"river {i}", KnowledgeLabel.UNKNOWN, scope, outcome=RetrievalOutcome.BETTER) for i in range(9)])
    with pytest.raises(BadSetting, match="The log has 9 helped and 0 hurt"):
        bind_gate(SkrGate(log, mode="classifier"), model, AnswerPrompts())


def test_the_logistic_regression_equals_scikit_learns():
    sklearn = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)).astype(np.float32)
    y = x[:, 0] + 0.5 * rng.standard_normal(200) > 0
    ours = fit_logistic(x, y, penalty=2.0)
    theirs = sklearn.LogisticRegression(C=0.5, tol=1e-8, max_iter=1000).fit(x, y)
    np.testing.assert_allclose(ours.weights, theirs.coef_[0], atol=1e-3)
