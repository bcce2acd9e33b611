import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from knowgate.stats.proportions import (
    cohens_kappa,
    estimate_proportion,
    mean_of_known,
    measure_agreement,
    pearson_correlation,
    upper_confidence_limit,
    wilson_interval,
)


def test_wilson_interval_of_five_in_ten():
    # centre (.5 + 3.8415/20) / 1.38415 = .5; half 1.96/1.38415 * sqrt(.025 + 3.8415/400) = .26340
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_wilson_interval_of_none_in_ten_is_z2_over_n_plus_z2():
    low, high = wilson_interval(0, 10)
    assert (low, high) == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))


def test_wilson_interval_never_leaves_zero_to_one():
    assert wilson_interval(7, 7)[1] == 1.0


def test_share_leaves_unknown_verdicts_out():
    found = estimate_proportion([True, None, False, True, None])
    assert (found.hits, found.n, found.value) == (2, 3, pytest.approx(2 / 3))


def test_share_of_nothing_has_no_value():
    found = estimate_proportion([None])
    assert (found.n, found.value, found.low) == (0, None, None)


def test_mean_leaves_unknown_values_out():
    assert mean_of_known([1.0, None, 0.0]) == 0.5
    assert mean_of_known([None]) is None


def test_pearson_by_hand():
    # deviations (-1, 0, 1) and (-1, 1, 0): sum of products 1, norms sqrt 2 each
    assert pearson_correlation([1, 2, 3], [1, 3, 2]).r == pytest.approx(0.5)


@pytest.mark.parametrize("values", [[], [0.3], [0.1, 0.1, 0.1]])
def test_pearson_of_a_constant_is_not_defined(values):
    found = pearson_correlation(values, values)
    assert (found.n, found.r) == (len(values), None)


def test_kappa_by_hand():
    # agree .7; first says yes .5, second .6: chance .3 + .2 = .5; kappa (.7 - .5) / .5
    pairs = [(True, True)] * 4 + [(True, False)] + [(False, True)] * 2 + [(False, False)] * 3
    found = measure_agreement("closed", ("exact", "contains"), pairs)
    assert (found.agree, found.kappa) == (pytest.approx(0.7), pytest.approx(0.4))
    assert (found.n, found.only_first, found.only_second) == (10, 1, 2)


def test_kappa_is_not_defined_when_both_always_say_the_same():
    assert measure_agreement("open", ("exact", "contains"), [(True, True)] * 3).kappa is None


def test_kappa_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    first = rng.random(200) < 0.4
    second = np.where(rng.random(200) < 0.7, first, rng.random(200) < 0.5)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    assert cohens_kappa(pairs) == pytest.approx(cohen_kappa_score(first, second))


def test_without_a_pair_there_is_no_kappa():
    found = measure_agreement("both", ("exact", "contains"), [])
    assert (found.n, found.agree, found.kappa) == (0, 0.0, None)


def test_the_graders_of_a_run_are_compared_by_the_same_kappa():
    pairs = [(True, True), (True, False), (False, False)]
    found = measure_agreement("both", ("exact", "contains"), pairs)
    assert (found.n, found.kappa) == (3, cohens_kappa(pairs))
    assert found.kappa == pytest.approx((2 / 3 - 4 / 9) / (1 - 4 / 9))


@pytest.mark.parametrize(("hits", "n", "limit"), [(0, 100, 0.0295), (5, 100, 0.1023), (100, 100, 1.0)])
def test_the_upper_limit_is_that_of_clopper_and_pearson(hits, n, limit):
    # scipy.stats.beta.ppf(0.95, hits + 1, n - hits)
    assert upper_confidence_limit(hits, n, 0.05) == pytest.approx(limit, abs=1e-4)
