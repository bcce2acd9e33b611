"""SKR: votes of the nearest logged questions, by hand."""

import pytest

from knowgate.errors import BadSetting
from knowgate.gates.reading import bind
from knowgate.gates.skr import SkrGate, majority, smooth
from knowgate.history.entries import Known, LogEntry, Outcome, Scope
from knowgate.history.sqlite import SqliteHistory
from knowgate.models.fake import FakeModel
from knowgate.prompts.answer import AnswerPrompts
from knowgate.types import Neighbour, Question
from tests.history.hash_embedder import HashEmbedder


def near(*outcomes, similarity=1.0, weight=1.0):
    return tuple(Neighbour("q", "known", similarity, outcome, weight=weight) for outcome in outcomes)


def test_the_majority_decides():
    assert majority(near("better", "better", "worse")) == 1.0
    assert majority(near("better", "worse", "worse")) == 0.0


def test_a_tie_or_nobody_near_retrieves():
    assert majority(near("better", "worse")) > SkrGate().threshold
    assert majority(()) > SkrGate().threshold
    assert smooth(()) > SkrGate().threshold


def test_the_smooth_vote_worked_out_by_hand():
    # two votes of 0.8 for, one of 0.8 against, prior 0.5 + 0.5: (1.6 + 0.5) / (2.4 + 1)
    assert smooth(near("better", "better", "worse", similarity=0.8)) == pytest.approx(2.1 / 3.4)


def test_less_trusted_labels_count_less():
    sure, weak = near("better"), near("better", weight=0.5)
    assert smooth(sure) == pytest.approx(1.5 / 2)
    assert smooth(weak) == pytest.approx(1.0 / 1.5)


def test_neighbours_for_which_nothing_changed_are_left_out(tmp_path):
    model = FakeModel()
    log = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    scope = Scope(model.fingerprint, AnswerPrompts().fingerprint)
    outcomes = [Outcome.SAME, Outcome.BETTER, Outcome.WORSE, None]
    log.add([LogEntry(f"town {i}", Known.KNOWN, scope, outcome=outcomes[i % 4]) for i in range(40)])
    gate = bind(SkrGate(log, k=6), model, AnswerPrompts())
    (found,) = gate.recall([Question("which town")])
    assert len(found) == 6
    assert {n.outcome for n in found} <= {Outcome.BETTER, Outcome.WORSE}


def test_k_must_be_positive():
    with pytest.raises(BadSetting, match="at least 1"):
        SkrGate(k=0)
