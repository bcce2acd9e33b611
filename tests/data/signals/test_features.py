"""Features: a number on record is taken as it stands; else it is worked out from what was read."""

import math

import numpy as np
import pytest

from knowgate.data.signals.confidence import self_assessment_logit
from knowgate.data.signals.features import FEATURES, available_features, feature_matrix
from knowgate.types import Completion, Question, Reading, Token

ASKED = Question("Who?")
STATES = np.array([[1, -1], [2, 0], [5, 5]], dtype=np.float32)  # Gram eigenvalues 4, 0, 0: see test_seakr


def test_self_assessment_is_the_difference_of_logits_at_the_last_position():
    assert self_assessment_logit(np.array([[9.0, 0.0], [1.5, 0.25]], dtype=np.float32)) == 1.25


def test_dispersion_is_read_from_the_recorded_signal():
    assert FEATURES["seakr"](ASKED, Reading(signals={"seakr": -3.0}, sample_states=STATES)) == -3.0


def test_dispersion_is_computed_if_not_recorded():
    expected = (math.log(4 + 1e-3) + 2 * math.log(1e-3)) / 3
    assert FEATURES["seakr"](ASKED, Reading(sample_states=STATES)) == pytest.approx(expected)


def test_a_feature_is_available_if_every_reading_has_it():
    told, silent = Reading(signals={"seakr": 1.0, "self_assessment": 2.0}), Reading(signals={"seakr": 1.0})
    assert available_features([ASKED] * 2, [told, silent]) == ["question_length", "seakr"]


def test_missing_features_are_nan():
    rows = feature_matrix(["self_assessment", "seakr"], [ASKED], [Reading(signals={"self_assessment": 2.0})])
    assert rows.shape == (1, 2)
    assert rows[0, 0] == 2.0
    assert math.isnan(rows[0, 1])


def test_log_probabilities_are_enough_for_features_that_read_nothing_else():
    tokens = (Token("Mid", -0.5), Token("night", -2.0))
    reading = Reading(draft=Completion("Midnight", tokens))
    names = available_features([ASKED], [reading])
    assert names[:5] == ["first", "mean", "min", "mean_surprisal", "min_surprisal"]
    assert not {"entropy", "margin"} & set(names)
    values = feature_matrix(names[:5], [ASKED], [reading])[0]
    assert values == pytest.approx([-0.5, -1.25, -2.0, math.log(1.25), math.log(2.0)])
