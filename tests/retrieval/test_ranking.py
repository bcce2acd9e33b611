import numpy as np
import pytest

from knowgate.core.nearest_neighbors import select_top_rows
from knowgate.errors import BadSetting
from knowgate.retrieval.bm25_scores import select_candidate_rows
from knowgate.retrieval.passages import check_k


def test_a_search_asks_for_at_least_one_passage():
    check_k(1)
    with pytest.raises(BadSetting, match="k=0 is not allowed: it must be at least 1"):
        check_k(0)


def by_hand(scores, k):
    """All that are above 0, ranked: the higher score, then the lower row."""
    return sorted(np.flatnonzero(scores > 0).tolist(), key=lambda row: (-scores[row], row))[:k]


@pytest.mark.parametrize("n", [5, 999, 1_000, 12_345])
@pytest.mark.parametrize("k", [1, 3, 12, 2_000])
@pytest.mark.parametrize("found", [0.0, 0.0005, 0.3])
def test_the_best_are_the_same_when_few_scores_are_ranked(n, k, found):
    rng = np.random.default_rng([n, k])
    scores = np.where(rng.random(n) < found, rng.integers(1, 40, n) / 8, 0).astype(np.float32)  # with many ties
    rows = select_candidate_rows(scores, k)
    assert (scores[rows] > 0).all()
    assert rows[select_top_rows(scores[rows], k)].tolist() == by_hand(scores, k)


def test_of_very_many_scores_few_are_ranked():
    scores = np.random.default_rng(0).random(100_000).astype(np.float32)
    assert len(select_candidate_rows(scores, 3)) < 1_000
