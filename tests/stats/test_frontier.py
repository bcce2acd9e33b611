import numpy as np
import pytest
from scipy.stats import binom

from knowgate.stats.bootstrap import Bootstrap, bootstrap_p_value, summarize_resamples
from knowgate.stats.metrics import compute_frontier, compute_oracle_frontier, weighted_mean
from knowgate.stats.proportions import holm_correction, mcnemar_test


def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs():
    first = np.array([True] * 9 + [False] * 2 + [True] * 5)
    second = np.array([False] * 9 + [True] * 2 + [True] * 5)
    p, only_first, only_second = mcnemar_test(first, second)
    assert (only_first, only_second) == (9, 2)
    assert p == pytest.approx(2 * binom.cdf(2, 11, 0.5))


def test_gates_that_agree_everywhere_do_not_differ():
    same = np.array([True, False, True])
    assert mcnemar_test(same, same) == (1.0, 0, 0)


def test_holm_multiplies_the_smallest_most_and_never_falls():
    assert holm_correction([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_correction([0.5, 0.9]) == [1.0, 1.0]


def test_the_frontier_goes_from_never_to_always_and_is_exact_between():
    closed, opened = np.array([True, False, False, False]), np.array([False, True, True, False])
    found = compute_frontier(closed, opened, np.array([0.1, 0.9, 0.5, 0.3]))
    assert found.accuracies == pytest.approx([0.25, 0.5, 0.75, 0.75, 0.5])
    assert found.area == pytest.approx((0.25 / 2 + 0.5 + 0.75 + 0.75 + 0.5 / 2) / 4)
    assert found.at(0.5) == pytest.approx(0.75)


def test_equal_needs_give_the_straight_line_of_random_retrieval():
    closed, opened = np.array([True, False, False]), np.array([False, True, True])
    found = compute_frontier(closed, opened, np.full(3, 0.5))
    assert found.accuracies == pytest.approx(np.linspace(1 / 3, 2 / 3, 4))
    assert found.area == pytest.approx(found.random_area)


def test_no_order_beats_the_oracles():
    rng = np.random.default_rng(0)
    closed, opened = rng.random(50) < 0.3, rng.random(50) < 0.5
    best = compute_oracle_frontier(closed, opened)
    some = compute_frontier(closed, opened, rng.random(50))
    assert (best.accuracies >= some.accuracies - 1e-12).all()
    assert best.accuracies.max() == pytest.approx((closed | opened).mean())


def test_the_bootstrap_interval_of_a_share_is_near_the_normal_one():
    values = np.array([1.0] * 300 + [0.0] * 700)
    found = summarize_resamples(
        Bootstrap(1000, 2000).apply([lambda weights: {"weighted_mean": weighted_mean(weights, values)}])[0][
            "weighted_mean"
        ]
    )
    half = 1.96 * np.sqrt(0.3 * 0.7 / 1000)
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.004)


def test_draws_are_the_same_for_the_same_seed():
    draws = Bootstrap(20, 300, seed=5)
    first, second = (
        [np.concatenate(list(draws.iter_weight_blocks(number))) for number in range(draws.n_portions)] for _ in range(2)
    )
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert sum(len(part) for part in first) == 301
    assert all((part.sum(axis=1) == 20).all() for part in first)


def test_a_difference_that_is_never_negative_has_the_smallest_p_value():
    assert bootstrap_p_value(np.concatenate([[0.1], np.full(999, 0.1)])) == pytest.approx(2 / 1000)
    assert bootstrap_p_value(np.zeros(100)) == 1.0
