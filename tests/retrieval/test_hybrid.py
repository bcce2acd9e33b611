from __future__ import annotations

from itertools import permutations

import pytest

from knowgate.retrieval.dense import HybridRetriever
from tests.support.retrieval_fakes import FixedRetriever


def test_scores_are_sums_of_reciprocal_ranks():
    hybrid = HybridRetriever([FixedRetriever("a", "b", "c"), FixedRetriever("c", "d")])
    (found,) = hybrid.search(["q"], 4)
    assert [passage.id for passage in found] == ["c", "a", "b", "d"]
    assert [passage.score for passage in found] == pytest.approx([1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62])


def test_passages_below_k_count_in_the_fusion():
    hybrid = HybridRetriever([FixedRetriever("a", "b"), FixedRetriever("c", "b")])
    (found,) = hybrid.search(["q"], 1)
    assert [passage.id for passage in found] == ["b"]


def test_the_same_ranks_in_another_order_give_equal_scores():
    rankings = [FixedRetriever(*"abc"), FixedRetriever(*"bca"), FixedRetriever(*"cab")]
    for order in permutations(rankings):
        (found,) = HybridRetriever(order).search(["q"], 3)
        assert len({passage.score for passage in found}) == 1
        assert [passage.id for passage in found] == [passage.id for passage in order[0].search(["q"], 3)[0]]


def test_an_empty_ranking_does_not_change_the_other():
    (found,) = HybridRetriever([FixedRetriever(), FixedRetriever("a", "b")]).search(["q"], 5)
    assert [passage.id for passage in found] == ["a", "b"]


def test_the_fingerprint_changes_with_its_retrievers():
    one = HybridRetriever([FixedRetriever("a"), FixedRetriever("b")])
    other = HybridRetriever([FixedRetriever("a"), FixedRetriever("c")])
    assert one.fingerprint != other.fingerprint
