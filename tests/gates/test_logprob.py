"""Gates that read token probabilities: logprob and flare."""

import math

import pytest

from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.gates.logprob import FlareGate, LogprobGate
from knowgate.types import Completion, Question, Reading, SignalRequest, Token

ASKED = [Question("?")]
# Two tokens of probability 0.5 and 0.8 with entropies ln 2 and ln 8, margins 0.2 and 0.6.
DRAFT = Completion(
    "Par is", (Token("Par", math.log(0.5), math.log(2), 0.2), Token("is", math.log(0.8), math.log(8), 0.6))
)


def need(statistic, draft=DRAFT):
    return LogprobGate(statistic).score(ASKED, [Reading(draft)])[0]


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("first", 0.5),
        ("mean", 1 - math.sqrt(0.4)),  # geometric mean of 0.5 and 0.8
        ("min", 0.5),
        ("entropy", 0.75),  # the mean of ln 2 and ln 8 is ln 4, so exp(-H) = 1/4
        ("margin", 0.6),  # mean margin 0.4
    ],
)
def test_need_is_one_minus_the_statistic(statistic, expected):
    assert need(statistic) == pytest.approx(expected)


def test_min_takes_the_least_probable_token_wherever_it_stands():
    tokens = tuple(Token("x", math.log(p)) for p in (0.9, 0.25, 0.5))
    assert need("min", Completion("xxx", tokens)) == pytest.approx(0.75)


def test_first_reads_only_the_first_token():
    tokens = (Token("x", 0.0), Token("y", -20.0))
    assert need("first", Completion("xy", tokens)) == 0.0


@pytest.mark.parametrize("statistic", ["first", "mean", "min", "entropy", "margin"])
def test_an_empty_draft_has_need_one(statistic):
    assert need(statistic, Completion("", ())) == 1.0


def test_an_impossible_token_gives_need_one():
    assert need("first", Completion("x", (Token("x", -math.inf),))) == 1.0


def test_a_probability_rounded_above_one_gives_need_zero():
    assert need("first", Completion("x", (Token("x", 1e-9),))) == 0.0


@pytest.mark.parametrize("statistic", ["first", "mean", "entropy", "margin"])
def test_a_nan_probability_is_an_error_not_a_score(statistic):
    broken = Completion("x", (Token("x", math.nan, math.nan, math.nan),))
    with pytest.raises(ModelError, match="not numbers"):
        need(statistic, broken)


@pytest.mark.parametrize("draft", [None, Completion("Paris")])
def test_without_log_probabilities_there_is_no_score(draft):
    with pytest.raises(UnsupportedSignal, match="no token log-probabilities"):
        need("first", draft)


@pytest.mark.parametrize(
    ("statistic", "others"),
    [
        ("entropy", "first, logprob:mean, logprob:min or logprob:margin"),
        ("margin", "first, logprob:mean or logprob:min"),
    ],
)
def test_an_unavailable_statistic_is_rejected_with_the_available_ones(statistic, others):
    with pytest.raises(UnsupportedSignal, match=others):
        need(statistic, Completion("x", (Token("x", -0.1),)))


def test_only_the_tokens_that_are_read_are_drafted():
    assert LogprobGate("first").request == SignalRequest(draft_tokens=1)
    assert LogprobGate("mean", draft_tokens=7).request == SignalRequest(draft_tokens=7)


@pytest.mark.parametrize("draft_tokens", [0, -1])
def test_a_draft_without_tokens_is_rejected(draft_tokens):
    with pytest.raises(BadSetting, match=r"draft_tokens=.* at least 1"):
        LogprobGate("mean", draft_tokens=draft_tokens)


def test_the_reason_names_the_draft_and_its_probability():
    assert LogprobGate("first").explain(ASKED, [Reading(DRAFT)]) == ["the first word of its draft was 50 % certain"]


def test_a_draft_made_longer_for_another_gate_is_cut():
    tokens = (*(Token("x", math.log(0.5)),) * 2, Token("y", -9.0))
    gate = LogprobGate("min", draft_tokens=2)
    assert gate.score(ASKED, [Reading(Completion("xxy", tokens))]) == [pytest.approx(0.5)]


# --- flare ---------------------------------------------------------------------------------------


def flare_need(*probabilities):
    draft = Completion("x", tuple(Token("x", math.log(p)) for p in probabilities))
    return FlareGate().score([Question("?")], [Reading(draft)])[0]


def test_need_is_one_minus_the_least_probability():
    assert flare_need(0.9, 0.3, 0.6) == pytest.approx(0.7)


@pytest.mark.parametrize(("least", "retrieves"), [(0.39, True), (0.41, False)])
def test_it_retrieves_when_a_token_is_below_theta(least, retrieves):
    assert (flare_need(0.9, least) > FlareGate(theta=0.4).threshold) is retrieves


def test_the_whole_answer_is_drafted():
    assert FlareGate(draft_tokens=20).request == SignalRequest(draft_tokens=20)


@pytest.mark.parametrize("theta", [-0.1, 1.1, float("nan")])
def test_a_theta_outside_0_to_1_is_rejected(theta):
    with pytest.raises(BadSetting, match=r"theta is .* between 0 and 1"):
        FlareGate(theta=theta)


def test_flare_rejects_a_draft_without_tokens():
    with pytest.raises(BadSetting, match="draft_tokens=0"):
        FlareGate(draft_tokens=0)
