"""The index in memory: exact against a full sort, and the graph beside it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from knowgate.history.index import VectorIndex


def unit(rows, width=16, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_exact_neighbours_equal_a_full_sort():
    vectors, queries = unit(3000), unit(5, seed=1)
    index = VectorIndex(16)
    for start in range(0, 3000, 700):
        index.add(range(start, min(start + 700, 3000)), vectors[start : start + 700])
    for query, hits in zip(queries, index.nearest(queries, 7), strict=True):
        scores = vectors.astype(np.float64) @ query.astype(np.float64)
        assert [number for number, _ in hits] == list(np.argsort(-scores)[:7])


def test_equal_neighbours_go_by_number():
    index = VectorIndex(16)
    for start in range(0, 300, 70):
        index.add(range(start, min(start + 70, 300)), np.tile(unit(1), (min(70, 300 - start), 1)))
    (hits,) = index.nearest(unit(1), 5)
    assert [number for number, _ in hits] == [0, 1, 2, 3, 4]
    assert len({similarity for _, similarity in hits}) == 1


def test_rows_that_are_dropped_are_not_found():
    vectors = unit(100)
    index = VectorIndex(16)
    index.add(range(100), vectors)
    index.keep(set(range(50)))
    assert len(index) == 50
    assert all(number < 50 for number, _ in index.nearest(vectors[70:71], 50)[0])


class FullGraph:
    """Stands in for usearch: finds every row, and like it rounds to half precision."""

    def __init__(self, **_: object):
        self.ids, self.vectors = np.empty(0, np.uint64), np.empty((0, 16), np.float16)

    def add(self, ids, vectors):
        self.ids, self.vectors = np.append(self.ids, ids), np.concatenate([self.vectors, vectors.astype(np.float16)])

    def search(self, queries, k):
        order = np.argsort(-(queries.astype(np.float16) @ self.vectors.T), axis=1)[:, :k]
        return SimpleNamespace(keys=self.ids[order])


def test_neighbours_named_by_the_graph_get_exact_cosines(monkeypatch):
    module = ModuleType("usearch.index")
    module.Index = FullGraph
    monkeypatch.setitem(sys.modules, "usearch", ModuleType("usearch"))
    monkeypatch.setitem(sys.modules, "usearch.index", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vectors, queries = unit(400), unit(5, seed=1)
    vectors[[8, 9, 10]] = vectors[5]
    index, exact = VectorIndex(16, exact_rows=100), VectorIndex(16)
    for each in (index, exact):
        each.add(range(10, 4010, 10), vectors)
    index.nearest(queries, 1)  # starts the building; exact until then
    index.wait()
    assert index.nearest(vectors[5:6], 3) == exact.nearest(vectors[5:6], 3)
    assert [number for number, _ in index.nearest(vectors[5:6], 3)[0]] == [60, 90, 100]
    assert index.nearest(queries, 10) == exact.nearest(queries, 10)


def test_approximate_search_finds_nearly_all_of_the_exact_neighbours():
    pytest.importorskip("usearch")
    vectors, queries = unit(4000), unit(20, seed=1)
    index, exact = VectorIndex(16, exact_rows=1000), VectorIndex(16)
    for each in (index, exact):
        each.add(range(4000), vectors)
    index.nearest(queries, 1)  # starts the building; exact until then
    index.wait()
    pairs = zip(index.nearest(queries, 10), exact.nearest(queries, 10), strict=True)
    recall = np.mean([len({n for n, _ in a} & {n for n, _ in b}) / 10 for a, b in pairs])
    assert recall > 0.9
