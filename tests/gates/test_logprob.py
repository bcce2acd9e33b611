import math

import pytest

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.gates.logprob import LogprobGate
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


def test_first_does_not_look_further():
    tokens = (Token("x", 0.0), Token("y", -20.0))
    assert need("first", Completion("xy", tokens)) == 0.0


@pytest.mark.parametrize("statistic", ["first", "mean", "min", "entropy", "margin"])
def test_a_model_with_nothing_to_say_must_look_up(statistic):
    assert need(statistic, Completion("", ())) == 1.0


def test_an_impossible_token_gives_need_one():
    assert need("first", Completion("x", (Token("x", -math.inf),))) == 1.0


def test_a_probability_just_above_one_by_rounding_gives_need_zero():
    assert need("first", Completion("x", (Token("x", 1e-9),))) == 0.0


@pytest.mark.parametrize("statistic", ["first", "mean", "entropy", "margin"])
def test_a_probability_that_is_not_a_number_is_an_error_not_a_score(statistic):
    broken = Completion("x", (Token("x", math.nan, math.nan, math.nan),))
    with pytest.raises(ModelError, match="not numbers"):
        need(statistic, broken)


@pytest.mark.parametrize("draft", [None, Completion("Paris")])
def test_without_log_probabilities_there_is_no_score(draft):
    with pytest.raises(NotOffered, match="logprobs"):
        need("first", draft)


@pytest.mark.parametrize(
    ("statistic", "others"), [("entropy", "first, mean, min or margin"), ("margin", "first, mean or min")]
)
def test_a_statistic_the_server_does_not_give_is_answered_with_those_it_does(statistic, others):
    with pytest.raises(NotOffered, match=others):
        need(statistic, Completion("x", (Token("x", -0.1),)))


def test_only_as_many_tokens_are_drafted_as_are_looked_at():
    assert LogprobGate("first").request == SignalRequest(draft_tokens=1)
    assert LogprobGate("mean", draft_tokens=7).request == SignalRequest(draft_tokens=7)


@pytest.mark.parametrize("draft_tokens", [0, -1])
def test_a_draft_without_tokens_is_refused(draft_tokens):
    with pytest.raises(BadSetting, match=r"draft_tokens=.* at least 1"):
        LogprobGate("mean", draft_tokens=draft_tokens)


def test_the_reason_names_the_draft_and_its_probability():
    assert LogprobGate("first").explain(ASKED, [Reading(DRAFT)]) == [
        "the first-token probability of the draft 'Par is' is 0.50"
    ]


def test_a_draft_made_longer_for_another_gate_is_cut():
    tokens = (*(Token("x", math.log(0.5)),) * 2, Token("y", -9.0))
    gate = LogprobGate("min", draft_tokens=2)
    assert gate.score(ASKED, [Reading(Completion("xxy", tokens))]) == [pytest.approx(0.5)]
