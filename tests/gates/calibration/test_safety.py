"""Net loss against always retrieving, its upper limit, and the number of questions that would prove it."""

import numpy as np
import pytest

from knowgate.gates.calibration.guarantee import compute_net_p_value
from knowgate.gates.calibration.threshold_choice import NetLoss, SafetyLimits, count_net_losses

LIMITS = SafetyLimits()


def test_lost_and_gained_questions_are_counted_against_the_open_book_answer():
    right = np.array([True, True, False, False])
    open_book_right = np.array([True, False, True, False])
    assert count_net_losses(right[None], open_book_right) == [NetLoss(lost=1, gained=1, n=4)]


def test_the_upper_limit_is_close_to_that_of_the_exact_test():
    loss = NetLoss(lost=40, gained=30, n=1000)
    upper = loss.upper(0.95)
    # The exact test just accepts a loss near the approximate limit.
    assert compute_net_p_value(40, 30, 1000, upper - 0.003, 0.05) > 0.05
    assert compute_net_p_value(40, 30, 1000, upper + 0.003, 0.05) < 0.05


def test_without_lost_questions_the_limit_still_shrinks_with_the_number_of_questions_only():
    assert NetLoss(0, 0, 50).upper() > LIMITS.loss_bound
    assert NetLoss(0, 0, 100).upper() < LIMITS.loss_bound


def test_a_loss_above_one_point_or_an_upper_limit_above_three_points_is_not_safe():
    assert LIMITS.accepts(NetLoss(5, 0, 1000))
    assert not LIMITS.accepts(NetLoss(12, 0, 1000))  # 1.2 points
    assert not LIMITS.accepts(NetLoss(200, 195, 1000))  # half a point, but at most 3.8 points


def test_the_required_number_of_questions_is_just_enough():
    required = NetLoss(10, 8, 200).count_required_rows(LIMITS)
    assert required is not None
    scale = required / 200
    assert NetLoss(round(10 * scale), round(8 * scale), required).upper() == pytest.approx(0.03, abs=0.002)


def test_no_number_of_questions_proves_a_loss_that_is_too_large():
    assert NetLoss(10, 0, 200).count_required_rows(LIMITS) is None
