from __future__ import annotations

import pytest

from knowgate.data.preferences import (
    CandidatePassage,
    Preference,
    compute_rank_metrics,
    precision_at,
    rank_hits,
    recall_at,
    reciprocal_rank_at,
)

HITS = [False, True, True, False, True]


@pytest.mark.parametrize(("k", "p", "r", "mrr"), [(1, 0.0, 0.0, 0.0), (3, 2 / 3, 2 / 3, 0.5), (5, 3 / 5, 1.0, 0.5)])
def test_metrics_equal_those_computed_by_hand(k, p, r, mrr):
    assert (precision_at(HITS, k), recall_at(HITS, k), reciprocal_rank_at(HITS, k)) == pytest.approx((p, r, mrr))


def row(positives: tuple[int, ...], negatives: tuple[int, ...], n: int = 5) -> Preference:
    candidates = tuple(CandidatePassage(str(place), f"text {place}") for place in range(n))
    return Preference("q", "q?", "test", candidates=candidates, positives=positives, negatives=negatives)


def test_only_positives_and_negatives_are_ranked():
    asked = row((3, 0), (4,))
    assert rank_hits(asked, [0.1, 9.0, 9.0, 0.3, 0.2]) == [True, False, True]
    assert rank_hits(asked.keep_pool(), [0.1, 0.3, 0.2]) == [True, False, True]


def test_equal_scores_keep_the_order_of_the_retriever():
    assert rank_hits(row((1,), (0, 2)), [0.0] * 5) == [False, True, False]


def test_every_row_has_every_metric():
    found = compute_rank_metrics([row((0,), (1, 2)), row((2,), (0, 1))], [[3, 2, 1, 0, 0], [3, 2, 1, 0, 0]])
    assert found["P@1"].tolist() == [1.0, 0.0]
    assert found["MRR@3"].tolist() == pytest.approx([1.0, 1 / 3])
    assert found["R@3"].tolist() == [1.0, 1.0]
    assert found["P@5"].tolist() == pytest.approx([1 / 5, 1 / 5])


def test_precision_divides_by_k_even_with_fewer_passages():
    assert precision_at([True, True, False], 5) == pytest.approx(0.4)
