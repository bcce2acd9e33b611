"""BM25 scores of all passages for the terms of a query, from the sparse matrix of term scores.

What bm25s gives, to the last bit: terms are added in the order of the query. A term that many passages hold is added as
a whole column, which takes a fraction of the time its passages take one by one. Knows arrays; no words, no passages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types import Vector

COMMON = 32  # a term is common if one passage in so many holds it
MOST_BYTES = 64 << 20  # of columns; those of the most common terms, where there is no room for all


class TermScores:
    """Adds up what the terms of a query are worth to each passage. `arrays`: bm25s' own."""

    def __init__(self, arrays: Mapping[str, Any]):
        # plain arrays, mapped into memory where they were: every slice of a memmap costs a microsecond
        self._data, self._rows, starts = (np.asarray(arrays[name]) for name in ("data", "indices", "indptr"))
        self._starts = starts
        self._passages = int(arrays["num_docs"])
        self._common: frozenset[int] | None = None
        self._columns: dict[int, Vector] = {}

    def __call__(self, terms: Sequence[int]) -> Vector:
        scores = np.zeros(self._passages, np.float32)
        for term in terms:
            if term in self._common_terms():
                scores += self._column(term)
            else:
                self._add(scores, term)
        return scores

    def _add(self, scores: NDArray[np.float32], term: int) -> None:
        part = slice(self._starts[term], self._starts[term + 1])
        np.add.at(scores, self._rows[part], self._data[part])

    def _column(self, term: int) -> Vector:
        if term not in self._columns:
            column = np.zeros(self._passages, np.float32)
            self._add(column, term)
            self._columns[term] = column
        return self._columns[term]

    def _common_terms(self) -> frozenset[int]:
        if self._common is None:
            held_by = np.diff(self._starts)
            most = MOST_BYTES // max(1, 4 * self._passages)
            terms = np.flatnonzero(held_by * COMMON >= max(self._passages, COMMON))
            best = terms[np.argsort(-held_by[terms], kind="stable")[:most]]
            self._common = frozenset(best.tolist())
        return self._common
