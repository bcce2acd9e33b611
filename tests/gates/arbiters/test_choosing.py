"""Which of two answers is given, and what is refused."""

import math

import pytest

from knowgate.errors import BadSetting, ModelError, UnknownName
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.arbitration import choose_answers, compute_beliefs
from knowgate.types import Arbiter, Belief
from tests.support.pairs_by_hand import Prefers, both


class Says(Arbiter):
    """Believes what it is told to."""

    name = "says"
    fingerprint = "says"

    def __init__(self, *beliefs):
        self.beliefs = list(beliefs)

    def estimate(self, answers):
        return self.beliefs


def test_answers_that_agree_are_not_asked_about():
    asked: list[str] = []
    choices = choose_answers(Prefers(asked=asked), [both("Paris", "paris."), both("memory", "Rome", question="other?")])
    assert asked == ["other?"]
    assert [choice.is_closed_book for choice in choices] == [False, True]
    assert choices[0].open_probability is None


def test_the_answer_believed_more_is_given_with_its_reason():
    choice = choose_answers(Says(Belief(0.7, 0.4)), [both("Paris", "Rome")])[0]
    assert (choice.is_closed_book, choice.closed, choice.open) == (True, "Paris", "Rome")
    assert choice.reason == (
        "the arbiter says gives the answer from memory: right with probability 0.70 from memory, 0.40 with passages"
    )


def test_where_both_are_believed_the_same_the_one_with_passages_is_given():
    assert not choose_answers(Says(Belief(0.5, 0.5)), [both("Paris", "Rome")])[0].is_closed_book


@pytest.mark.parametrize("belief", [Belief(math.nan, 0.5), Belief(0.5, 1.5)])
def test_a_belief_that_is_no_probability_is_refused(belief):
    with pytest.raises(ModelError, match="arbiter 'says' gave"):
        compute_beliefs(Says(belief), [both("Paris", "Rome")])


def test_one_belief_for_each_pair_is_wanted():
    with pytest.raises(ModelError, match="gave 0 beliefs for 1 pairs"):
        compute_beliefs(Says(), [both("Paris", "Rome")])


def test_an_unknown_arbiter_is_answered_with_those_there_are():
    with pytest.raises(UnknownName, match="rules"):
        load_arbiter("rulez")


def test_an_arbiter_that_must_be_fitted_says_how():
    with pytest.raises(BadSetting, match="`knowgate fit arbiter` with mode=features"):
        load_arbiter("features")


def test_an_arbiter_needs_to_give_only_what_it_believes():
    plain = Says()
    assert (plain.needs, plain.needs_passages, plain.makes_drafts, plain.accepts_beginning("x")) == (
        frozenset(),
        False,
        True,
        False,
    )
