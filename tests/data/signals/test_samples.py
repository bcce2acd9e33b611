"""Mastery, certainty, effect and benefit, by hand."""

import math

import pytest

from knowgate.data.signals.samples import Effect, certainty, mastery, retrieval_benefit, retrieval_effect


def test_mastery_is_the_share_of_correct_samples():
    assert mastery([True] * 20 + [False] * 10) == pytest.approx(2 / 3)


def test_mastery_ignores_ungraded_samples():
    assert mastery([True, None, False, None]) == 0.5


def test_mastery_is_none_without_grades():
    assert mastery([None, None]) is None
    assert mastery([]) is None


def test_certainty_is_one_when_all_answers_are_equal():
    assert certainty(["paris"] * 30) == 1.0


def test_certainty_is_zero_when_every_answer_differs():
    assert certainty([str(i) for i in range(30)]) == pytest.approx(0.0)


def test_certainty_uses_logarithms_to_the_base_of_the_number_of_samples():
    # two answers, half each, of four: entropy = 1 bit = log 2 / log 4 = 1/2
    assert certainty(["a", "a", "b", "b"]) == pytest.approx(0.5)


def test_certainty_of_a_skewed_split_worked_out_by_hand():
    # shares 3/4 and 1/4 of 4 samples, natural logs divided by log 4
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert certainty(["a", "a", "a", "b"]) == pytest.approx(1 - entropy)


def test_certainty_needs_two_samples():
    assert certainty(["a"]) is None
    assert certainty([]) is None


@pytest.mark.parametrize(
    ("closed", "opened", "expected"),
    [(0.2, 0.5, Effect.BENEFICIAL), (0.5, 0.5, Effect.NEUTRAL), (0.9, 0.1, Effect.HARMFUL), (None, 0.5, None)],
)
def test_the_effect_compares_the_indicator_with_and_without_retrieval(closed, opened, expected):
    assert retrieval_effect(closed, opened) == expected


def test_rounding_in_the_last_bit_is_neutral():
    assert retrieval_effect(0.1 + 0.2, 0.3) == Effect.NEUTRAL


def test_benefit_is_the_open_book_grade_minus_the_closed_book_grade():
    assert [
        retrieval_benefit(False, True),
        retrieval_benefit(True, True),
        retrieval_benefit(False, False),
        retrieval_benefit(True, False),
    ] == [1, 0, 0, -1]
    assert retrieval_benefit(None, True) is None
