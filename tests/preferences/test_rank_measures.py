from __future__ import annotations

import numpy as np
import pytest

from knowgate.errors import BadInput
from knowgate.preferences.rank_measures import estimate, hits_of, precision, rank_values, recall, reciprocal_rank
from knowgate.preferences.record import Candidate, Preference

HITS = [False, True, True, False, True]


@pytest.mark.parametrize(("k", "p", "r", "mrr"), [(1, 0.0, 0.0, 0.0), (3, 2 / 3, 2 / 3, 0.5), (5, 3 / 5, 1.0, 0.5)])
def test_measures_by_hand(k, p, r, mrr):
    assert (precision(HITS, k), recall(HITS, k), reciprocal_rank(HITS, k)) == pytest.approx((p, r, mrr))


def row(positives: tuple[int, ...], negatives: tuple[int, ...], n: int = 5) -> Preference:
    candidates = tuple(Candidate(str(place), f"text {place}") for place in range(n))
    return Preference("q", "q?", "test", candidates=candidates, positives=positives, negatives=negatives)


def test_only_positives_and_negatives_are_ranked():
    asked = row((3, 0), (4,))
    assert hits_of(asked, [0.1, 9.0, 9.0, 0.3, 0.2]) == [True, False, True]
    assert hits_of(asked.only_pool(), [0.1, 0.3, 0.2]) == [True, False, True]


def test_equal_scores_stay_in_the_retrievers_order():
    assert hits_of(row((1,), (0, 2)), [0.0] * 5) == [False, True, False]


def test_every_row_has_every_measure():
    found = rank_values([row((0,), (1, 2)), row((2,), (0, 1))], [[3, 2, 1, 0, 0], [3, 2, 1, 0, 0]])
    assert found["P@1"].tolist() == [1.0, 0.0]
    assert found["MRR@3"].tolist() == pytest.approx([1.0, 1 / 3])
    assert found["R@3"].tolist() == [1.0, 1.0]
    assert found["P@5"].tolist() == pytest.approx([1 / 3, 1 / 3])  # of three passages


def test_a_paired_interval_is_narrower_than_the_two_systems_are_spread():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    better = np.clip(hard + 0.05 + 0.01 * rng.standard_normal(200), 0, None)
    gain = estimate(better - hard)
    assert gain.low > 0.045
    assert gain.high < 0.055
    assert estimate(hard).high - estimate(hard).low > 0.06


def test_the_bootstrap_of_a_coin_is_about_the_normal_interval():
    coin = np.array([1.0, 0.0] * 200)
    found = estimate(coin)
    half = 1.96 * 0.5 / np.sqrt(400)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.006)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(BadInput, match="no question"):
        estimate(np.array([]))
