"""Which rows are nearest must not hang on how a BLAS rounds: exact integers and random duplicates decide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.nearest_neighbors import NearestHits, find_nearest_rows, max_row_norm, score_rows, select_top_rows
from knowgate.types import Vector


@dataclass(frozen=True)
class Search:
    """Vectors many of which are equal, and how they are searched."""

    vectors: Vector
    queries: Vector
    k: int
    block_rows: int

    def nearest(self, block_rows: int | None = None) -> list[NearestHits]:
        rows = block_rows or self.block_rows
        return find_nearest_rows(
            self.vectors, self.queries, self.k, max_norm=max_row_norm(self.vectors), block_rows=rows
        )


@st.composite
def searches(draw: st.DrawFn, *, whole: bool) -> Search:
    """`whole`: of whole numbers, whose products any BLAS sums without rounding; else of numbers as models give them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width, different, rows = draw(st.integers(1, 70)), draw(st.integers(1, 12)), draw(st.integers(1, 120))
    n_queries, k, block_rows = draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 130))
    drawn = rng.normal(size=(different + n_queries, width))
    values = (drawn * 4).round() if whole else drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    pool, queries = np.split(values.astype(np.float32), [different])
    return Search(pool[rng.integers(0, different, rows)], queries, k, block_rows)


@given(searches(whole=True))
def test_the_order_is_that_of_exact_products_and_then_of_rows(search: Search):
    products = search.queries.astype(int) @ search.vectors.astype(int).T
    for hits, exact in zip(search.nearest(), products, strict=True):
        expected = sorted(range(len(exact)), key=lambda row: (-exact[row], row))[: search.k]
        assert hits.rows.tolist() == expected
        assert hits.scores.tolist() == exact[expected].tolist()


@given(searches(whole=False), st.integers(1, 130))
def test_rows_and_scores_do_not_depend_on_the_blocks(search: Search, other: int):
    for one, two in zip(search.nearest(), search.nearest(other), strict=True):
        assert one.rows.tolist() == two.rows.tolist()
        assert one.scores.tolist() == two.scores.tolist()


@given(searches(whole=False))
def test_equal_vectors_get_equal_scores_and_are_sorted_by_row(search: Search):
    for hits in search.nearest():
        pairs = list(zip(hits.rows.tolist(), hits.scores.tolist(), strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        for row, score in pairs:
            twins = np.flatnonzero((search.vectors == search.vectors[row]).all(axis=1))
            assert set(twins[: np.searchsorted(twins, row)]) <= set(hits.rows.tolist())
            assert {found for place, found in pairs if place in twins} == {score}


@given(searches(whole=False))
def test_scores_are_the_inner_products(search: Search):
    for query, hits in zip(search.queries, search.nearest(), strict=True):
        for row, score in zip(hits.rows, hits.scores, strict=True):
            exact = math.fsum(float(a) * float(b) for a, b in zip(query, search.vectors[row], strict=True))
            assert float(score) == pytest.approx(exact, rel=1e-7, abs=1e-12)


def test_vectors_of_different_norms_are_ranked_correctly():
    vectors = np.array([[3e4, 1], [3e4, 20], [3e4, 20]], np.float32)
    (hits,) = find_nearest_rows(vectors, vectors[1:2], 2, max_norm=max_row_norm(vectors), block_rows=1)
    assert hits.rows.tolist() == [1, 2]


def test_a_rows_score_does_not_depend_on_the_rows_beside_it():
    vectors = np.random.default_rng(0).normal(size=(300, 384)).astype(np.float32)
    alone = [score_rows(vectors, np.array([row]), vectors[0]).scores[0] for row in range(300)]
    assert score_rows(vectors, np.arange(300), vectors[0]).scores.tolist() == alone


def test_all_rows_are_returned_if_there_are_fewer_than_k():
    vectors = np.eye(3, dtype=np.float32)
    (hits,) = find_nearest_rows(vectors, vectors[2:], 9, max_norm=1.0, block_rows=2)
    assert (hits.rows.tolist(), hits.scores.tolist()) == ([2, 0, 1], [1.0, 0.0, 0.0])


def test_ties_are_sorted_by_index():
    assert select_top_rows(np.array([1.0, 2.0, 0.0, 2.0, 1.0]), 3).tolist() == [1, 3, 0]


def test_the_largest_norm_of_no_rows_is_zero():
    assert max_row_norm(np.empty((0, 4), np.float32)) == 0.0
    assert max_row_norm(np.array([[3, 4], [1, 0]], np.float32), block_rows=1) == 5.0
