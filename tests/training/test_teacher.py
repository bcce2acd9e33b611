"""Soft labels: half the grade, half the teacher's word, for the rows that are learnt from."""

from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import Artifact
from knowgate.training.judges import answer_judge as teacher
from knowgate.training.judges.answer_judge import make_hard_labels, make_soft_labels
from knowgate.types import Signal
from tests.support.judge_data import planted


class Teacher:
    """A gate that gives every question the same need."""

    needs = frozenset({Signal.DRAFT})

    def __init__(self, need):
        self.need = need
        self.artifact = Artifact(Path("t"), {"target": "known"})

    def score(self, questions, readings):
        return [self.need for _ in questions]


@pytest.fixture
def examples(tmp_path):
    return planted(tmp_path, 60)


def test_the_teachers_word_counts_half_where_it_is_learned_from(examples, monkeypatch):
    monkeypatch.setattr(teacher, "load_fitted_gate", lambda folder: Teacher(0.2))
    shares = make_soft_labels(examples, "t", [0, 1])
    graded = make_hard_labels(examples)
    assert shares[:2] == pytest.approx(0.5 * graded[:2] + 0.5 * 0.8)
    assert np.array_equal(shares[2:], graded[2:])


def test_a_teacher_that_needs_more_than_text_is_refused(examples, monkeypatch):
    probe = Teacher(0.5)
    probe.needs = frozenset({Signal.HIDDEN})
    monkeypatch.setattr(teacher, "load_fitted_gate", lambda folder: probe)
    with pytest.raises(BadSetting, match="does not predict from texts alone"):
        make_soft_labels(examples, "t", [0])
