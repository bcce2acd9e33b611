"""BM25 scores of every term in every passage, worked out block by block: a corpus need not fit in memory.

The passages are read once. What a block of them holds of each term is kept on disk until all are counted, then scored
and put where it belongs: term by term, and within a term in the order of the passages. The numbers are those that bm25s
works out for the whole corpus at once, to the last bit; its files are read by bm25s.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types import Vector

BLOCK_PASSAGES = 20_000  # passages whose terms are in memory at once: some 100 MB
IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class PostingsBlock:
    """What some passages hold: rising terms, within a term rising passages, and how often it stands there."""

    terms: IntArray
    passages: IntArray
    counts: IntArray

    @property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each term begins in the block, and how many passages hold it."""
        starts = np.flatnonzero(np.diff(self.terms, prepend=-1))
        return starts, np.diff(np.append(starts, len(self.terms)))


@dataclass
class Postings:
    """The terms of a corpus, counted. scratch: a folder for what does not fit in memory; None to keep all there."""

    scratch: Path | None = None
    vocabulary: dict[str, int] = field(default_factory=dict)
    lengths: array[int] = field(default_factory=lambda: array("i"))  # of the passages, in terms
    _blocks: list[PostingsBlock | Path] = field(default_factory=list)

    def add(self, texts: Iterable[list[str]]) -> None:
        """The terms of each passage, in the order of the passages."""
        passages = iter(texts)
        while some := [array("i", self._numbered(terms)) for terms in itertools.islice(passages, BLOCK_PASSAGES)]:
            block = _counted(some, len(self.lengths))
            self.lengths.extend(map(len, some))
            self._blocks.append(block if self.scratch is None else _put_away(block, self.scratch, len(self._blocks)))

    def _numbered(self, terms: list[str]) -> list[int]:
        """Terms are numbered as they come, so equal corpora give equal files."""
        return [self.vocabulary.setdefault(term, len(self.vocabulary)) for term in terms]

    def scores(self, k1: float, b: float) -> dict[str, Any]:
        """The sparse matrix of bm25s (Lucene's variant): columns are terms, rows are passages."""
        found = np.zeros(len(self.vocabulary), dtype=np.int64)
        for block in self._read():
            starts, sizes = block.runs
            found[block.terms[starts]] += sizes
        ends = np.concatenate([[0], np.cumsum(found)])
        data, rows = self._array("data", int(ends[-1]), np.float32), self._array("rows", int(ends[-1]), np.int32)
        rarity, next_place = _idf(found, len(self.lengths)), ends[:-1].copy()
        slowed = _slowed(np.frombuffer(self.lengths, dtype=np.int32), k1, b)
        for block in self._read():
            starts, sizes = block.runs
            places = np.repeat(next_place[block.terms[starts]] - starts, sizes) + np.arange(len(block.terms))
            counts = block.counts.astype(np.float32)
            data[places] = rarity[block.terms] * (counts / (slowed[block.passages] + counts))
            rows[places] = block.passages
            next_place[block.terms[starts]] += sizes
        return {"data": data, "indices": rows, "indptr": ends, "num_docs": len(self.lengths)}

    def _read(self) -> Iterator[PostingsBlock]:
        for block in self._blocks:
            yield block if isinstance(block, PostingsBlock) else PostingsBlock(*np.load(block))

    def _array(self, name: str, size: int, kind: type[np.generic]) -> NDArray[Any]:
        if self.scratch is None or not size:
            return np.empty(size, dtype=kind)
        return np.lib.format.open_memmap(self.scratch / f"{name}.npy", mode="w+", dtype=kind, shape=(size,))


def _counted(passages: list[array[int]], first: int) -> PostingsBlock:
    lengths = np.array([len(terms) for terms in passages])
    terms = np.concatenate([np.frombuffer(one, dtype=np.int32) for one in passages if one] or [np.empty(0, np.int32)])
    owner = np.repeat(np.arange(len(passages)), lengths)
    pairs, counts = np.unique(terms.astype(np.int64) * len(passages) + owner, return_counts=True)
    split = pairs // len(passages), pairs % len(passages) + first
    return PostingsBlock(*(one.astype(np.int32) for one in (*split, counts)))


def _put_away(block: PostingsBlock, folder: Path, number: int) -> Path:
    file = folder / f"block-{number}.npy"
    np.save(file, np.stack([block.terms, block.passages, block.counts]))
    return file


def _idf(found: NDArray[np.int64], n: int) -> NDArray[np.float32]:
    """ln(1 + (N - df + 0.5) / (df + 0.5)), worked out once for every df."""
    kinds, which = np.unique(found, return_inverse=True)
    each = [math.log(1 + (n - df + 0.5) / (df + 0.5)) for df in kinds.tolist()]
    return np.array(each, dtype=np.float32)[which]


def _slowed(lengths: IntArray, k1: float, b: float) -> NDArray[np.float64]:
    """How much each further occurrence counts less: k1 * (1 - b + b * length / mean length)."""
    slowed: NDArray[np.float64] = k1 * ((1 - b) + b * lengths / lengths.mean())
    return slowed


COMMON_TERM_RATIO = 32  # a term is common if one passage in so many holds it
MAX_COLUMN_BYTES = 64 << 20  # of columns; those of the most common terms, where there is no room for all


class TermScorer:
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
            most = MAX_COLUMN_BYTES // max(1, 4 * self._passages)
            terms = np.flatnonzero(held_by * COMMON_TERM_RATIO >= max(self._passages, COMMON_TERM_RATIO))
            best = terms[np.argsort(-held_by[terms], kind="stable")[:most]]
            self._common = frozenset(best.tolist())
        return self._common
