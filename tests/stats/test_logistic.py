import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from knowgate.stats.metrics import PROBABILITY_FLOOR, logit, sigmoid


def test_a_float_gives_a_float():
    assert sigmoid(0.0) == 0.5
    assert isinstance(sigmoid(0.0), float)
    assert isinstance(logit(0.5), float)


def test_sigmoid_and_logit_of_arrays_equal_scipy():
    z = np.linspace(-40, 40, 161)
    assert sigmoid(z) == pytest.approx(expit(z), rel=1e-14)


@pytest.mark.parametrize("far", [800.0, 1e300, float("inf")])
def test_sigmoid_of_extreme_values_is_0_or_1_without_warnings(far):
    assert (sigmoid(far), sigmoid(-far)) == (1.0, 0.0)
    assert sigmoid(np.array([-far, far])).tolist() == [0.0, 1.0]


def test_nan_stays_nan():
    assert np.isnan(sigmoid(float("nan")))


@given(st.floats(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR))
def test_the_logit_undoes_the_sigmoid(p):
    assert sigmoid(logit(p)) == pytest.approx(p)


def test_the_logits_of_0_and_1_are_finite_and_opposite():
    assert logit(1.0) == pytest.approx(-logit(0.0))
    assert logit(np.array([0.0]))[0] == logit(PROBABILITY_FLOOR)
