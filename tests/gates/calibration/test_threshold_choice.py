"""Thresholds by rate, by accuracy and by a largest loss, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.data.splits import fingerprint_text, mark_held_out, split_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    choose_for_accuracy,
    choose_for_rate,
    evaluate_threshold,
    list_candidate_thresholds,
)

NEEDS = np.array([0.1, 0.2, 0.4, 0.8])


def table(*rows):
    """(need, closed right, open right)"""
    needs, closed, opened = zip(*rows, strict=True)
    return GateOutcomes(np.array(needs), np.array(closed, dtype=bool), np.array(opened, dtype=bool))


# --- rate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "threshold"), [(1, ALWAYS_RETRIEVE), (0.75, 0.15), (0.5, 0.3), (0.25, 0.6), (0, 1.0)])
def test_the_threshold_is_midway_between_skipped_and_retrieved(rate, threshold):
    assert choose_for_rate(NEEDS, rate) == threshold


def test_a_rate_between_two_is_not_exceeded():
    assert choose_for_rate(NEEDS, 0.7) == 0.3  # 50 %, not 75 %


def test_equal_needs_are_skipped_together():
    assert choose_for_rate(np.array([0.3, 0.3, 0.3, 0.9]), 0.5) == 0.6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1))
def test_the_rate_is_never_above_the_wanted_one(needs, rate):
    values = np.array(needs)
    assert (values > choose_for_rate(values, rate)).mean() <= rate + 1e-9


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.floats(0, 1))
def test_no_other_threshold_within_the_rate_retrieves_more(needs, rate):
    values = np.array(needs) / 20
    within = [(values > t).mean() for t in (ALWAYS_RETRIEVE, *np.arange(21) / 20) if (values > t).mean() <= rate + 1e-9]
    assert (values > choose_for_rate(values, rate)).mean() == max(within)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_rejected(rate):
    with pytest.raises(BadSetting, match="between 0 and 1"):
        choose_for_rate(NEEDS, rate)


def test_no_questions_give_no_threshold():
    with pytest.raises(BadInput, match="no questions"):
        choose_for_rate(np.empty(0), 0.5)


# --- accuracy -------------------------------------------------------------------------------------


def test_known_questions_are_skipped_and_helped_ones_retrieved():
    assert choose_for_accuracy(table((0.1, 1, 0), (0.2, 1, 1), (0.6, 0, 1), (0.9, 0, 1))) == pytest.approx(0.4)


def test_of_equally_good_thresholds_the_one_that_retrieves_least_is_chosen():
    assert choose_for_accuracy(table((0.1, 1, 1), (0.2, 0, 0), (0.6, 0, 1), (0.8, 1, 1))) == pytest.approx(0.4)


def test_if_only_retrieval_is_right_everything_is_retrieved():
    assert choose_for_accuracy(table((0.0, 0, 1), (0.5, 0, 1))) == ALWAYS_RETRIEVE


def test_if_retrieval_only_hurts_everything_is_skipped():
    assert choose_for_accuracy(table((0.3, 1, 0), (1.0, 1, 0))) == 1.0


ROWS = st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=30)


def outcomes_of(rows):
    return table(*((need / 20, closed, opened) for need, closed, opened in rows))


@given(ROWS)
def test_no_other_threshold_is_better(rows):
    found = outcomes_of(rows)
    best = evaluate_threshold(found, choose_for_accuracy(found)).right
    assert best == max(evaluate_threshold(found, t).right for t in (ALWAYS_RETRIEVE, *np.arange(21) / 20))


@given(ROWS)
def test_no_threshold_that_is_as_good_retrieves_less(rows):
    found = outcomes_of(rows)
    chosen = evaluate_threshold(found, choose_for_accuracy(found))
    tried = [evaluate_threshold(found, t) for t in (ALWAYS_RETRIEVE, *np.arange(21) / 20)]
    assert chosen.retrieved == min(one.retrieved for one in tried if one.right == chosen.right)


@given(ROWS)
def test_the_order_of_the_rows_does_not_matter(rows):
    assert choose_for_accuracy(outcomes_of(rows)) == choose_for_accuracy(outcomes_of(rows[::-1]))


def test_a_threshold_has_few_digits():
    assert choose_for_accuracy(table((0.1, 1, 0), (1 / 3, 0, 1))) == 0.216667


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.data())
def test_close_needs_are_separated(needs, data):
    """Whatever a threshold can do to these questions one of the candidates does."""
    verdicts = st.lists(st.booleans(), min_size=len(needs), max_size=len(needs))
    found = table(*zip(needs, data.draw(verdicts), data.draw(verdicts), strict=True))
    best = evaluate_threshold(found, choose_for_accuracy(found)).right
    assert best == max(evaluate_threshold(found, t).right for t in (ALWAYS_RETRIEVE, *needs))
    assert len(list_candidate_thresholds(found.needs)) == len(set(needs)) + 1


# --- what it comes to ------------------------------------------------------------------------------


def test_counts_under_a_threshold_are_those_worked_out_by_hand():
    found = evaluate_threshold(table((0.1, 1, 0), (0.2, 0, 1), (0.6, 0, 1), (0.9, 1, 1)), 0.5)
    assert (found.n, found.retrieved, found.right, found.right_always, found.right_never, found.harmed) == (
        4, 2, 3, 3, 2, 1,
    )  # fmt: skip
    assert (found.rate, found.accuracy, found.loss) == (0.5, 0.75, 0.0)


def test_a_need_equal_to_the_threshold_is_skipped():
    assert evaluate_threshold(table((0.5, 1, 1)), 0.5).retrieved == 0


# --- the split ------------------------------------------------------------------------------------


def test_the_test_split_of_a_fit_is_halved_too():
    """With the hash of the fit, the questions it left aside would all be held out, or none."""
    texts = [f"question {i}?" for i in range(4000)]
    left = split_questions(texts, seed=0).test
    assert 0.4 < mark_held_out([fingerprint_text(texts[place]) for place in left], 0.5).mean() < 0.6
