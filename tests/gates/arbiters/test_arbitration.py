"""Which of two answers is given, and what is refused."""

import math

import pytest

from knowgate.errors import BadSetting, ModelError, UnknownName
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.arbitration import accepts_beginning, choose_answers, compute_beliefs
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


def test_the_arbiter_is_not_called_for_answers_that_agree():
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


@pytest.mark.parametrize(
    ("closed", "open_book", "given"), [("", "Rome", "Rome"), ("\n", "Rome", "Rome"), ("Paris", " ", "Paris")]
)
def test_an_empty_answer_is_never_chosen_and_the_arbiter_is_not_called(closed, open_book, given):
    asked: list[str] = []
    [choice] = choose_answers(Prefers(asked=asked), [both(closed, open_book)])
    assert (choice.closed if choice.is_closed_book else choice.open) == given
    assert choice.reason.endswith("is empty")
    assert asked == []


def test_the_rules_prefer_an_abstention_to_an_empty_answer():
    [choice] = choose_answers(load_arbiter("rules"), [both("I don't know.", "")])
    assert choice.is_closed_book


def test_two_empty_answers_agree():
    [choice] = choose_answers(Says(), [both("", "\n")])
    assert not choice.is_closed_book
    assert choice.open_probability is None


def test_white_space_is_not_streamed_before_the_choice():
    hasty = Says()
    hasty.accepts_beginning = lambda beginning: True
    assert [accepts_beginning(hasty, beginning) for beginning in ("", " \n", " P")] == [False, False, True]


def test_equal_beliefs_choose_the_answer_with_passages():
    assert not choose_answers(Says(Belief(0.5, 0.5)), [both("Paris", "Rome")])[0].is_closed_book


@pytest.mark.parametrize("belief", [Belief(math.nan, 0.5), Belief(0.5, 1.5)])
def test_a_belief_outside_0_to_1_is_rejected(belief):
    with pytest.raises(ModelError, match="arbiter 'says' returned"):
        compute_beliefs(Says(belief), [both("Paris", "Rome")])


def test_an_arbiter_must_give_one_belief_per_pair():
    with pytest.raises(ModelError, match="returned 0 results for 1 pairs"):
        compute_beliefs(Says(), [both("Paris", "Rome")])


def test_an_unknown_arbiter_is_rejected_with_the_known_ones():
    with pytest.raises(UnknownName, match="rules"):
        load_arbiter("rulez")


def test_an_unfitted_arbiter_says_how_to_fit_it():
    with pytest.raises(BadSetting, match="`knowgate fit arbiter` with mode=features"):
        load_arbiter("features")


def test_an_arbiter_needs_only_name_fingerprint_and_estimate():
    plain = Says()
    assert (plain.needs, plain.needs_passages, plain.makes_drafts, plain.accepts_beginning("x")) == (
        frozenset(),
        False,
        True,
        False,
    )
