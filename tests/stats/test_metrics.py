"""Each measure by hand and against scikit-learn; the weighted form and the plain one are the same."""

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from knowgate.stats.metrics import (
    N_ECE_BINS,
    NeedRanking,
    accuracy,
    auroc,
    weighted_accuracy,
    weighted_brier,
    weighted_ece,
    weighted_mean,
)

NEEDED, NEEDS = np.array([False, True, True, True]), np.array([0.1, 0.1, 0.9, 0.9])


def drawn(n=400, seed=0, digits=None):
    """Needs (with ties if rounded) and outcomes that follow them loosely."""
    rng = np.random.default_rng(seed)
    needs = rng.random(n)
    needed = rng.random(n) < 0.2 + 0.6 * needs
    return needed, (needs if digits is None else needs.round(digits))


def measures(needed, needs, weights):
    ranked = NeedRanking(needs)
    drawn = ranked.sort(weights)
    areas = ranked.areas(drawn, needed)
    np.testing.assert_array_equal(areas["auroc"], ranked.auroc(drawn, needed))
    return {
        **areas,
        "accuracy": weighted_accuracy(weights, needed, needs),
        "brier": weighted_brier(weights, needed, needs),
        "ece": weighted_ece(weights, needed, needs),
    }


def plain(name, needed, needs):
    """The unweighted measure."""
    return measures(needed, needs, np.ones((1, len(needs))))[name][0]


def ones(n):
    return np.ones((1, n), dtype=np.float32)


# --- by hand and by scikit-learn ------------------------------------------------------------------


def test_measures_have_the_values_worked_out_by_hand():
    assert auroc(NEEDED, NEEDS) == pytest.approx((0.5 + 1 + 1) / 3)  # pairs in order, ties for half
    assert plain("brier", NEEDED, NEEDS) == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert plain("ece", NEEDED, NEEDS) == pytest.approx(0.5 * abs(0.5 - 0.1) + 0.5 * abs(1 - 0.9))
    assert accuracy(NEEDED, NEEDS) == pytest.approx(3 / 4)
    assert plain("auprc", NEEDED, NEEDS) == pytest.approx(2 / 3 * 1 + 1 / 3 * 3 / 4)


@pytest.mark.parametrize("digits", [None, 1])
def test_measures_equal_scikit_learns(digits):
    needed, needs = drawn(digits=digits)
    assert auroc(needed, needs) == pytest.approx(roc_auc_score(needed, needs), abs=1e-12)
    assert plain("auprc", needed, needs) == pytest.approx(average_precision_score(needed, needs), abs=1e-12)
    assert plain("brier", needed, needs) == pytest.approx(brier_score_loss(needed, needs), abs=1e-12)


def test_the_calibration_error_is_that_of_scikit_learns_curve():
    needed, needs = drawn()
    shares, means = calibration_curve(needed, needs, n_bins=N_ECE_BINS)
    counts = np.histogram(needs, N_ECE_BINS, (0, 1))[0] / len(needs)
    assert plain("ece", needed, needs) == pytest.approx(float(np.abs(shares - means) @ counts[counts > 0]))


def test_a_need_of_one_falls_into_the_last_bin():
    assert plain("ece", np.array([True, False]), np.array([1.0, 0.0])) == 0.0


def test_the_area_under_risk_and_coverage_by_hand():
    # least need first: right, wrong, wrong -> risks 0, 1/2, 2/3
    found = measures(np.array([False, True, True]), np.array([0.1, 0.2, 0.3]), ones(3))
    assert found["aurc"][0] == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unweighted", [auroc, accuracy])
def test_unit_weights_give_the_unweighted_metric(unweighted):
    needed, needs = drawn(digits=1)
    weighted = measures(needed, needs, ones(len(needs)))[unweighted.__name__]
    assert weighted[0] == pytest.approx(unweighted(needed, needs), abs=1e-6)


def test_a_weight_of_two_is_the_question_twice():
    needed, needs = drawn(50, digits=1)
    counts = np.random.default_rng(1).integers(0, 4, 50)
    twice = np.repeat(np.arange(50), counts)
    by_weight = measures(needed, needs, counts[None, :].astype(np.float32))
    by_rows = measures(needed[twice], needs[twice], ones(len(twice)))
    assert {name: value[0] for name, value in by_weight.items()} == pytest.approx(
        {name: value[0] for name, value in by_rows.items()}, abs=1e-6
    )


def test_the_mean_of_a_table_is_that_of_its_columns():
    rng = np.random.default_rng(0)
    weights, table = rng.integers(0, 3, (5, 20)).astype(np.float32), rng.random((20, 3))
    columns = [weighted_mean(weights, table[:, number]) for number in range(3)]
    assert weighted_mean(weights, table) == pytest.approx(np.stack(columns, axis=1))
    assert weighted_mean(weights[:1], table[:, 0])[0] == pytest.approx(np.average(table[:, 0], weights=weights[0]))


# --- where there is nothing to measure ------------------------------------------------------------


def test_rank_metrics_are_undefined_with_one_kind_of_question():
    found = measures(np.array([True, True]), np.array([0.1, 0.2]), ones(2))
    assert np.isnan(found["auroc"][0])
    assert auroc(np.array([True, True]), np.array([0.1, 0.2])) is None
    assert np.isnan(plain("auprc", np.array([False, False]), np.array([0.1, 0.2])))


@pytest.mark.parametrize("unweighted", [auroc, accuracy])
def test_without_questions_no_measure_is_defined(unweighted):
    assert unweighted(np.empty(0, dtype=bool), np.empty(0)) is None
