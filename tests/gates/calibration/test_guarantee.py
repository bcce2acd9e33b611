"""Learn-then-Test: by hand, by simulation, and against MAPIE."""

import numpy as np
import pytest
from mapie.risk_control import BinaryClassificationController, BinaryRisk

from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.guarantee import (
    THRESHOLD_GRID,
    compute_harm_p_values,
    compute_required_rows,
    learn_then_test,
)
from knowgate.gates.calibration.threshold_choice import GateOutcomes, count_harmed


def outcomes(needs, harmed):
    """Every question is right with passages, and without them unless it is harmed."""
    harm = np.array(harmed, dtype=bool)
    return GateOutcomes(np.array(needs, dtype=float), ~harm, np.ones(len(harm), dtype=bool))


def uniform(n, slope, seed):
    """Needs uniform in [0, 1]; harm with probability slope * need, so R(t) = slope * t^2 / 2."""
    rng = np.random.default_rng(seed)
    needs = rng.uniform(size=n)
    return outcomes(needs, rng.uniform(size=n) < slope * needs)


# --- by hand --------------------------------------------------------------------------------------


def test_harmed_questions_are_counted_up_to_the_threshold():
    found = outcomes([0.1, 0.2, 0.2, 0.9], [False, True, True, True])
    assert count_harmed(found, np.array([ALWAYS_RETRIEVE, 0.1, 0.2, 0.89, 0.9])).tolist() == [0, 0, 2, 2, 3]


def test_only_an_open_right_and_closed_wrong_answer_is_harm():
    found = GateOutcomes(np.zeros(4), np.array([True, True, False, False]), np.array([True, False, True, False]))
    assert found.harmed_if_skipped.tolist() == [False, False, True, False]


def test_the_p_value_is_the_binomial_probability_of_so_few_harms():
    # (1 - 0.1)^10 and + 10 * 0.1 * 0.9^9
    assert compute_harm_p_values(np.array([0, 1]), 10, 0.1) == pytest.approx([0.9**10, 0.9**10 + 10 * 0.1 * 0.9**9])


def test_the_walk_stops_before_the_first_threshold_that_fails():
    # epsilon 0.5, delta 0.25, n = 4: P(0 harms) = 1/16, P(at most 1) = 5/16 > 0.25
    found = learn_then_test(outcomes([0.1, 0.3005, 0.5, 0.7], [False, True, False, False]), 0.5, 0.25)
    assert (found.threshold, found.harmed, found.p_value) == (0.3, 0, pytest.approx(1 / 16))


def test_later_thresholds_are_not_tried_after_a_failure():
    grid = np.array([ALWAYS_RETRIEVE, 0.2, 0.4])
    found = learn_then_test(outcomes([0.1] * 2 + [0.3] * 40, [True] * 2 + [False] * 40), 0.02, 0.5, grid)
    assert found.threshold == ALWAYS_RETRIEVE


def test_without_any_harm_everything_may_be_skipped():
    assert learn_then_test(outcomes([0.5] * 149, [False] * 149), 0.02, 0.05).threshold == 1.0


def test_an_impossible_target_gives_a_threshold_below_every_need():
    found = learn_then_test(outcomes([0.0] * 200, [True] * 200), 0.02, 0.05)
    assert found.threshold == ALWAYS_RETRIEVE
    assert (np.array([0.0, 0.5, 1.0]) > found.threshold).all()


def test_a_proven_threshold_that_skips_nothing_becomes_always_retrieve():
    assert learn_then_test(outcomes([0.3] * 200, [True] * 200), 0.02, 0.05).threshold == ALWAYS_RETRIEVE


def test_too_few_questions_prove_nothing():
    found = learn_then_test(outcomes([0.5] * 148, [False] * 148), 0.02, 0.05)
    assert found.threshold == ALWAYS_RETRIEVE
    assert found.p_value > 0.05


@pytest.mark.parametrize(
    ("epsilon", "delta", "n"), [(0.02, 0.05, 149), (0.01, 0.05, 299), (0.05, 0.1, 45), (0.5, 0.25, 2)]
)
def test_the_required_rows_are_those_of_the_first_test(epsilon, delta, n):
    assert compute_required_rows(epsilon, delta) == n
    assert compute_harm_p_values(0, n, epsilon) <= delta < compute_harm_p_values(0, n - 1, epsilon)


def test_a_target_with_half_the_risk_needs_about_390_questions():
    """METHODS section 8: epsilon .02, delta .05."""
    enough = [n for n in range(100, 1000) if compute_harm_p_values(n // 100, n, 0.02) <= 0.05]
    assert 380 <= enough[0] <= 400


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 0.05), (1, 0.05), (-0.1, 0.05), (0.02, 0), (0.02, 1)])
def test_targets_that_cannot_be_proven_are_rejected(epsilon, delta):
    with pytest.raises(BadSetting, match="must be above 0 and below 1"):
        compute_required_rows(epsilon, delta)


def test_the_grid_rises_from_skipping_nothing_to_skipping_everything():
    assert THRESHOLD_GRID[0] == ALWAYS_RETRIEVE
    assert THRESHOLD_GRID[-1] == 1.0
    assert (np.diff(THRESHOLD_GRID) > 0).all()
    assert 0.31 in THRESHOLD_GRID  # as it is typed


# --- simulated ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "delta"), [(0.02, 0.05), (0.05, 0.1)])
def test_500_calibrations_break_the_guarantee_no_more_often_than_allowed(epsilon, delta):
    times, slope = 500, 0.4
    thresholds = [learn_then_test(uniform(400, slope, seed), epsilon, delta).threshold for seed in range(times)]
    risks = np.array([slope * max(t, 0) ** 2 / 2 for t in thresholds])
    share = (risks > epsilon).mean()
    assert share <= delta + 3 * np.sqrt(delta * (1 - delta) / times)
    assert share > 0  # not by being timid: the promise is used up
    assert risks.mean() > epsilon / 3


def test_the_guarantee_holds_with_tied_and_uninformative_needs():
    """Ties move many questions at once; a need that says nothing makes every skip as risky as the next."""
    times, epsilon, delta, broken = 500, 0.05, 0.1, 0
    for seed in range(times):
        rng = np.random.default_rng(seed)
        needs = rng.integers(1, 6, 300) / 10
        t = learn_then_test(outcomes(needs, rng.uniform(size=300) < 0.12), epsilon, delta).threshold
        broken += 0.12 * np.mean(np.arange(1, 6) / 10 <= t) > epsilon
    assert broken / times <= delta + 3 * np.sqrt(delta * (1 - delta) / times)


# --- against MAPIE --------------------------------------------------------------------------------

HARMED_SKIP = BinaryRisk(
    risk_occurrence=lambda harmed, skipped: (harmed == 1) & (skipped == 1),
    risk_condition=lambda harmed, skipped: np.ones(len(harmed), dtype=bool),
    higher_is_better=False,
)


def mapie_controller(found, epsilon, delta, grid):
    """MAPIE predicts 'skip' where 1 - need is at least its parameter; it rounds n * (k / n) up, so n = 2^m."""
    controller = BinaryClassificationController(
        lambda x: np.column_stack([x[:, 0], 1 - x[:, 0]]),
        HARMED_SKIP,
        epsilon,
        1 - delta,
        best_predict_param_choice=HARMED_SKIP,
        list_predict_params=1 - grid,
        fwer_method="fixed_sequence",
    )
    return controller.calibrate(found.needs[:, None], found.harmed_if_skipped.astype(int))


@pytest.mark.parametrize("seed", range(5))
def test_p_values_and_threshold_are_those_of_mapie(seed):
    found, epsilon, delta = uniform(512, 0.3, seed), 0.04, 0.1
    grid = THRESHOLD_GRID[1::25]  # MAPIE's parameters lie in [0, 1]
    controller = mapie_controller(found, epsilon, delta, grid)
    assert controller.p_values.ravel() == pytest.approx(compute_harm_p_values(count_harmed(found, grid), 512, epsilon))
    laxest = 1 - np.min(controller.valid_predict_params)
    assert learn_then_test(found, epsilon, delta, grid).threshold == pytest.approx(laxest)
