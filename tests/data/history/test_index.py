"""The index in memory: exact against a full sort, and lists of near ones against the exact."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.data.history.inverted_file import erase_rows
from knowgate.data.history.vector_index import IndexLocation, VectorIndex


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


def clustered(rows, width=16, seed=0):
    """Vectors as questions have them: a few hundred topics, and some noise."""
    dice = np.random.default_rng(seed)
    topics = np.random.default_rng(99).standard_normal((200, width))
    vectors = topics[dice.integers(0, 200, rows)] + 0.6 * dice.standard_normal((rows, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def place_in(folder, stamp="log"):
    return IndexLocation(folder / "log-lists", "scope", stamp)


def listed(folder, vectors, first=0, **options):
    """An index whose rows are in lists."""
    index = VectorIndex(16, exact_rows=100, place=place_in(folder), **options)
    index.add(range(first, first + len(vectors)), vectors)
    index.nearest(vectors[:1], 1)  # begins to make them; exact until then
    index.wait()
    return index


def recall(index, exact, queries, k=10):
    pairs = zip(index.nearest(queries, k), exact.nearest(queries, k), strict=True)
    return np.mean([len({n for n, _ in a} & {n for n, _ in b}) / k for a, b in pairs])


def exact_over(vectors):
    index = VectorIndex(16)
    index.add(range(len(vectors)), vectors)
    return index


def test_lists_that_are_all_looked_at_give_what_exact_search_gives(tmp_path):
    vectors, queries = unit(400), unit(5, seed=1)
    vectors[[8, 9, 10]] = vectors[5]
    index, exact = listed(tmp_path, vectors), exact_over(vectors)
    assert index.listed == 399
    assert index.nearest(vectors[5:6], 3) == exact.nearest(vectors[5:6], 3)
    assert [number for number, _ in index.nearest(vectors[5:6], 3)[0]] == [5, 8, 9]
    assert index.nearest(queries, 10) == exact.nearest(queries, 10)


def test_a_few_lists_hold_nearly_all_of_the_exact_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.data.history.inverted_file.MIN_PROBED_ROWS", 1000)
    vectors, queries = clustered(10_000), clustered(50, seed=1)
    assert recall(listed(tmp_path, vectors), exact_over(vectors), queries) > 0.9


def test_rows_that_came_later_are_found_at_once_and_are_put_into_the_lists_there_are(tmp_path):
    vectors = clustered(3000)
    index = listed(tmp_path, vectors[:2000], fresh_rows=500)
    before = sorted(path.name for path in (tmp_path / "log-lists").glob("*centres*"))
    index.add(range(2000, 2400), vectors[2000:2400])
    assert index.nearest(vectors[2300:2301], 1)[0][0][0] == 2300
    assert index.listed == 1999
    index.add(range(2400, 3000), vectors[2400:])
    index.nearest(vectors[:1], 1)
    index.wait()
    assert (index.listed, len(index)) == (2999, 3000)
    (after,) = (tmp_path / "log-lists").glob("*centres*")
    assert [after.name] != before
    assert index.nearest(vectors[::300], 5) == exact_over(vectors).nearest(vectors[::300], 5)


def test_the_next_process_finds_the_lists_and_needs_only_what_came_since(tmp_path):
    vectors = clustered(2000)
    listed(tmp_path, vectors)
    again = VectorIndex(16, exact_rows=100, place=place_in(tmp_path))
    assert (again.listed, len(again)) == (1999, 2000)
    assert again.nearest(vectors[:3], 4) == exact_over(vectors).nearest(vectors[:3], 4)
    assert VectorIndex(16, place=place_in(tmp_path, "another log")).listed == -1
    assert VectorIndex(8, place=place_in(tmp_path)).listed == -1


@pytest.mark.parametrize("part", ["centres", "starts", "ids", "vectors"])
def test_damaged_lists_are_as_good_as_none(tmp_path, part):
    listed(tmp_path, clustered(500))
    (file,) = (tmp_path / "log-lists").glob(f"*.{part}.npy")
    file.write_bytes(file.read_bytes()[: 140 if part != "centres" else 60])
    assert VectorIndex(16, place=place_in(tmp_path)).listed == -1


def test_wiped_rows_are_found_no_more_and_leave_the_files(tmp_path):
    vectors = clustered(600)
    index = listed(tmp_path, vectors)
    erase_rows(tmp_path / "log-lists", [7, 11])
    assert 7 not in [number for number, _ in index.nearest(vectors[7:8], 600)[0]]
    (file,) = (tmp_path / "log-lists").glob("*.vectors.npy")
    assert vectors[7].tobytes() not in file.read_bytes()
    assert vectors[8].tobytes() in file.read_bytes()
    index.add(range(600, 600 + 30_000), clustered(30_000, seed=3))
    index.nearest(vectors[:1], 1)
    index.wait()
    assert len(index) == 30_598  # what was wiped is not carried on


def test_where_nothing_can_be_written_search_stays_exact(tmp_path, caplog):
    (tmp_path / "log-lists").write_text("a file in the way")
    vectors = clustered(500)
    index = listed(tmp_path, vectors)
    assert index.listed == -1
    assert "search stays exact" in caplog.text
    assert index.nearest(vectors[:2], 3) == exact_over(vectors).nearest(vectors[:2], 3)
