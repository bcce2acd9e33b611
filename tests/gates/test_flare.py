import math

import pytest

from knowgate.errors import BadSetting
from knowgate.gates.logprob import FlareGate
from knowgate.types import Completion, Question, Reading, SignalRequest, Token


def need(*probabilities):
    draft = Completion("x", tuple(Token("x", math.log(p)) for p in probabilities))
    return FlareGate().score([Question("?")], [Reading(draft)])[0]


def test_need_is_one_minus_the_least_probability():
    assert need(0.9, 0.3, 0.6) == pytest.approx(0.7)


@pytest.mark.parametrize(("least", "retrieves"), [(0.39, True), (0.41, False)])
def test_it_retrieves_when_a_token_is_below_theta(least, retrieves):
    assert (need(0.9, least) > FlareGate(theta=0.4).threshold) is retrieves


def test_the_whole_answer_is_drafted():
    assert FlareGate(draft_tokens=20).request == SignalRequest(draft_tokens=20)


@pytest.mark.parametrize("theta", [-0.1, 1.1, float("nan")])
def test_a_theta_that_is_no_probability_is_refused(theta):
    with pytest.raises(BadSetting, match=r"theta is .* between 0 and 1"):
        FlareGate(theta=theta)


def test_a_draft_without_tokens_is_refused():
    with pytest.raises(BadSetting, match="draft_tokens is 0"):
        FlareGate(draft_tokens=0)
