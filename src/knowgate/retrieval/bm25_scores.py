"""BM25 scores of terms in passages: computed block by block for an index, added up for a query.

The numbers equal those of bm25s to the last bit, and bm25s reads the files. The corpus need not fit in memory: the
passages are read once, the term counts of each block of passages go to disk, and once all passages are counted the
blocks are scored and written term by term.
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

BLOCK_PASSAGES = 20_000  # counted in memory at once, about 100 MB
COMMON_TERM_RATIO = 32  # a term is common if at least one passage in 32 contains it
MAX_COLUMN_BYTES = 64 << 20  # for the score columns of common terms; the most common terms come first
SEGMENT_ROWS = 1_000  # `select_candidate_rows` compares the highest scores of segments of this size
IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class PostingsBlock:
    """Term counts of a block of passages, sorted by term and then by passage."""

    terms: IntArray
    passages: IntArray
    counts: IntArray

    def find_runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each distinct term starts and how many passages contain it."""
        starts = np.flatnonzero(np.diff(self.terms, prepend=-1))
        return starts, np.diff(np.append(starts, len(self.terms)))


@dataclass
class Postings:
    """Term counts of a corpus.

    Args:
        scratch: Folder for the blocks and the resulting arrays; None keeps everything in memory.
        vocabulary: The number of each term.
        lengths: The length of each passage in terms.
    """

    scratch: Path | None = None
    vocabulary: dict[str, int] = field(default_factory=dict)
    lengths: array[int] = field(default_factory=lambda: array("i"))
    _blocks: list[PostingsBlock | Path] = field(default_factory=list)

    def add(self, passages: Iterable[list[str]]) -> None:
        """Count the terms of passages, each given as its list of terms, in the order of the index."""
        iterator = iter(passages)
        while block := [array("i", self._number_terms(terms)) for terms in itertools.islice(iterator, BLOCK_PASSAGES)]:
            postings = _count_terms(block, first_row=len(self.lengths))
            self.lengths.extend(map(len, block))
            self._blocks.append(postings if self.scratch is None else self._write(postings, self.scratch))

    def _number_terms(self, terms: list[str]) -> list[int]:
        """Number terms in the order they appear, so that equal corpora give equal files."""
        return [self.vocabulary.setdefault(term, len(self.vocabulary)) for term in terms]

    def compute_scores(self, k1: float, b: float) -> dict[str, Any]:
        """Return the sparse score matrix of bm25s (Lucene's variant): terms are columns, passages are rows."""
        frequencies = np.zeros(len(self.vocabulary), dtype=np.int64)  # of each term: the passages that contain it
        for block in self._read_blocks():
            starts, sizes = block.find_runs()
            frequencies[block.terms[starts]] += sizes
        offsets = np.concatenate([[0], np.cumsum(frequencies)])
        size = int(offsets[-1])
        data, rows = self._create_array("data", size, np.float32), self._create_array("rows", size, np.int32)
        idf, next_offset = _compute_idf(frequencies, len(self.lengths)), offsets[:-1].copy()
        norms = _compute_length_norms(np.frombuffer(self.lengths, dtype=np.int32), k1, b)
        for block in self._read_blocks():
            starts, sizes = block.find_runs()
            targets = np.repeat(next_offset[block.terms[starts]] - starts, sizes) + np.arange(len(block.terms))
            counts = block.counts.astype(np.float32)
            data[targets] = idf[block.terms] * (counts / (norms[block.passages] + counts))
            rows[targets] = block.passages
            next_offset[block.terms[starts]] += sizes
        return {"data": data, "indices": rows, "indptr": offsets, "num_docs": len(self.lengths)}

    def _read_blocks(self) -> Iterator[PostingsBlock]:
        for block in self._blocks:
            yield block if isinstance(block, PostingsBlock) else PostingsBlock(*np.load(block))

    def _write(self, block: PostingsBlock, folder: Path) -> Path:
        path = folder / f"block-{len(self._blocks)}.npy"
        np.save(path, np.stack([block.terms, block.passages, block.counts]))
        return path

    def _create_array(self, name: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
        if self.scratch is None or not size:
            return np.empty(size, dtype=dtype)
        return np.lib.format.open_memmap(self.scratch / f"{name}.npy", mode="w+", dtype=dtype, shape=(size,))


def _count_terms(passages: list[array[int]], first_row: int) -> PostingsBlock:
    lengths = np.array([len(terms) for terms in passages])
    arrays = [np.frombuffer(terms, dtype=np.int32) for terms in passages if terms]
    terms = np.concatenate(arrays or [np.empty(0, np.int32)])
    owners = np.repeat(np.arange(len(passages)), lengths)
    pairs, counts = np.unique(terms.astype(np.int64) * len(passages) + owners, return_counts=True)
    columns = (pairs // len(passages), pairs % len(passages) + first_row, counts)
    return PostingsBlock(*(column.astype(np.int32) for column in columns))


def _compute_idf(frequencies: NDArray[np.int64], n: int) -> NDArray[np.float32]:
    """Return ln(1 + (N - df + 0.5) / (df + 0.5)) of each term, computed once per distinct df."""
    distinct, inverse = np.unique(frequencies, return_inverse=True)
    values = [math.log(1 + (n - df + 0.5) / (df + 0.5)) for df in distinct.tolist()]
    return np.array(values, dtype=np.float32)[inverse]


def _compute_length_norms(lengths: IntArray, k1: float, b: float) -> NDArray[np.float64]:
    """Return k1 * (1 - b + b * length / mean length) of each passage."""
    norms: NDArray[np.float64] = k1 * ((1 - b) + b * lengths / lengths.mean())
    return norms


class TermScorer:
    """Adds up the term scores of a query for every passage.

    Terms are added in the order of the query, so that the sums equal those of bm25s. A common term is added as a
    dense column, which is many times faster than adding its passages one by one.

    Args:
        arrays: The sparse matrix of bm25s: `data`, `indices`, `indptr` and `num_docs`.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        # np.asarray still maps the file but avoids the overhead of slicing a memmap, a microsecond each time.
        self._data, self._rows, self._starts = (np.asarray(arrays[name]) for name in ("data", "indices", "indptr"))
        self._n_passages = int(arrays["num_docs"])
        self._common_terms: frozenset[int] | None = None
        self._columns: dict[int, Vector] = {}

    def __call__(self, terms: Sequence[int]) -> Vector:
        if self._common_terms is None:
            self._common_terms = self._find_common_terms()
        scores = np.zeros(self._n_passages, np.float32)
        for term in terms:
            if term in self._common_terms:
                scores += self._get_column(term)
            else:
                self._add_term(scores, term)
        return scores

    def _add_term(self, scores: NDArray[np.float32], term: int) -> None:
        span = slice(self._starts[term], self._starts[term + 1])
        np.add.at(scores, self._rows[span], self._data[span])

    def _get_column(self, term: int) -> Vector:
        if term not in self._columns:
            column = np.zeros(self._n_passages, np.float32)
            self._add_term(column, term)
            self._columns[term] = column
        return self._columns[term]

    def _find_common_terms(self) -> frozenset[int]:
        frequencies = np.diff(self._starts)
        max_columns = MAX_COLUMN_BYTES // max(1, 4 * self._n_passages)
        common = np.flatnonzero(frequencies * COMMON_TERM_RATIO >= max(self._n_passages, COMMON_TERM_RATIO))
        most_common = common[np.argsort(-frequencies[common], kind="stable")[:max_columns]]
        return frozenset(most_common.tolist())


def select_candidate_rows(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Return, in increasing order, rows with a positive score that include the k best and all ties with them.

    If each of k segments has a row that reaches some score, rows below that score cannot be among the k best. For a
    million passages this halves the time of a search.
    """
    n_segmented = len(scores) - len(scores) % SEGMENT_ROWS
    if k > n_segmented // SEGMENT_ROWS:
        return np.flatnonzero(scores > 0)
    segment_maxima = scores[:n_segmented].reshape(-1, SEGMENT_ROWS).max(axis=1)
    threshold = np.partition(segment_maxima, len(segment_maxima) - k)[len(segment_maxima) - k]
    return np.flatnonzero(scores >= threshold) if threshold > 0 else np.flatnonzero(scores > 0)
