"""BM25 search with bm25s: term scores in a sparse matrix, memory-mapped when opened from disk.

Scores are Lucene's variant (k1 = 1.5, b = 0.75):
    sum over query terms of idf * tf / (tf + k1 * (1 - b + b * length / mean length)),
    idf = ln(1 + (N - df + 0.5) / (df + 0.5))
Reference: Robertson and Zaragoza 2009; Lù 2024 (bm25s).
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knowgate.core.nearest_neighbors import NearestHits
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.retrieval.passage_store import MAX_SCANNED_VALUES, create_array, read_array
from knowgate.retrieval.passages import check_k, format_passage, read_hits
from knowgate.retrieval.tokenizer import Tokenizer
from knowgate.types import Passage

K1, B = 1.5, 0.75
BLOCK_PASSAGES = 20_000  # passages whose terms are counted in memory at once; this takes about 100 MB
SEGMENT_ROWS = 1_000  # `select_candidate_rows` compares the highest scores of segments of this size
MAX_QUERY_TERMS = 1_024  # different terms of a query that are searched; OpenSearch has the same limit by default
IntArray = NDArray[np.int32]


class PostingsBlock(NamedTuple):
    """The number of times each term occurs in each passage of a block.

    Entries are sorted by term and then by passage.

    Args:
        terms: Numbers of terms (columns in the score matrix).
        passages: Numbers of passages (rows in the index).
        counts: How often the term occurs in the passage.
    """

    terms: IntArray
    passages: IntArray
    counts: IntArray


class Postings:
    """The number of times each term occurs in each passage of a corpus.

    Counts are stored on disk, in blocks of passages.

    Args:
        scratch: A folder for the blocks and the resulting arrays.

    Attributes:
        vocabulary: Maps each term to its number, which is its column in the score matrix.
        lengths: The number of terms in each passage.
    """

    def __init__(self, scratch: Path):
        self.vocabulary: dict[str, int] = {}
        self.lengths = array("i")
        self._scratch = scratch
        self._blocks: list[Path] = []

    def add(self, passages: Iterable[list[str]]) -> None:
        """Add passages to the index: number their terms and count how often each occurs.

        Args:
            passages: The list of terms of each passage, in the order of the index.
        """
        numbered = (array("i", self._number_terms(terms)) for terms in passages)
        while block := list(itertools.islice(numbered, BLOCK_PASSAGES)):
            path = self._scratch / f"block-{len(self._blocks)}.npy"
            np.save(path, np.stack(_count_terms(block, first_row=len(self.lengths))))
            self._blocks.append(path)
            self.lengths.extend(map(len, block))

    def _number_terms(self, terms: list[str]) -> list[int]:
        """Return the number of each term. A new term gets the next number."""
        return [self.vocabulary.setdefault(term, len(self.vocabulary)) for term in terms]

    def compute_scores(self) -> dict[str, Any]:
        """Compute the BM25 score of each term in each passage.

        The result is a sparse matrix in the CSC format of bm25s.
        """
        frequencies = self._count_passages_per_term()
        # The scores of term t fill the slots offsets[t] to offsets[t + 1] - 1 of the output arrays.
        offsets = np.concatenate([[0], np.cumsum(frequencies)])
        next_slots = offsets[:-1].copy()  # the next free slot of each term
        data = create_array(self._scratch / "data.npy", (int(offsets[-1]),), np.float32)
        rows = create_array(self._scratch / "rows.npy", (int(offsets[-1]),), np.int32)
        idf = _compute_idf(frequencies, len(self.lengths))
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        norms = K1 * ((1 - B) + B * lengths / lengths.mean())
        for block in self._read_blocks():
            counts = block.counts.astype(np.float32)
            slots = _assign_slots(block.terms, next_slots)  # moves `next_slots` on
            data[slots] = idf[block.terms] * (counts / (norms[block.passages] + counts))
            rows[slots] = block.passages
        return {"data": data, "indices": rows, "indptr": offsets, "num_docs": len(self.lengths)}

    def _count_passages_per_term(self) -> NDArray[np.int64]:
        """Count how many passages contain each term."""
        counts = np.zeros(len(self.vocabulary), dtype=np.int64)
        for block in self._read_blocks():
            counts += np.bincount(block.terms, minlength=len(counts))
        return counts

    def _read_blocks(self) -> Iterator[PostingsBlock]:
        for path in self._blocks:
            yield PostingsBlock(*np.load(path))


def _assign_slots(terms: IntArray, next_slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each entry's score in the output array, where all scores of a term are side by side.

    Example: the terms [0, 0, 2] with the next free slots [5, 8, 9] get the slots [5, 6, 9].

    Args:
        terms: The term of each entry, in increasing order.
        next_slots: The next free slot of each term. The slots that this call assigns are added.
    """
    n_entries = np.bincount(terms, minlength=len(next_slots))  # of each term
    first_entries = np.cumsum(n_entries) - n_entries  # index of the first entry of each term
    ranks = np.arange(len(terms)) - first_entries[terms]  # 0 for the first entry of its term, 1 for the second, ...
    slots: NDArray[np.int64] = next_slots[terms] + ranks
    next_slots += n_entries
    return slots


def _count_terms(passages: list[array[int]], first_row: int) -> PostingsBlock:
    """Count how often each term occurs in each passage of a block.

    Args:
        passages: The terms of each passage, as numbers.
        first_row: The row in the index of the first of these passages.
    """
    n = len(passages)
    arrays = [np.frombuffer(passage, dtype=np.int32) for passage in passages if passage]
    terms = np.concatenate(arrays or [np.empty(0, np.int32)]).astype(np.int64)
    owners = np.repeat(np.arange(n), [len(passage) for passage in passages])  # the passage that each term occurs in
    # Each pair of a term and a passage becomes one integer, so that a single np.unique sorts and counts the pairs.
    pairs, counts = np.unique(terms * n + owners, return_counts=True)
    distinct_terms = pairs // n
    rows = pairs % n + first_row
    return PostingsBlock(distinct_terms.astype(np.int32), rows.astype(np.int32), counts.astype(np.int32))


def _compute_idf(frequencies: NDArray[np.int64], n: int) -> NDArray[np.float32]:
    """Return the inverse document frequency (rarity) of each term.

    Args:
        frequencies: For each term, the number of passages that contain it (df).
        n: The number of passages (N).
    """
    # Many terms have the same df, so the slow logarithm is computed once per distinct value. `positions` says where
    # among the distinct values the df of each term is.
    distinct, positions = np.unique(frequencies, return_inverse=True)
    values = [math.log(1 + (n - df + 0.5) / (df + 0.5)) for df in distinct.tolist()]
    return np.array(values, dtype=np.float32)[positions]


def select_candidate_rows(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Return the rows that may have one of the k best scores. Rows with score 0 are never returned.

    Comparing the maxima of segments is faster than sorting all scores.
    """
    n_segments = len(scores) // SEGMENT_ROWS
    if k > n_segments:
        return np.flatnonzero(scores > 0)
    maxima = scores[: n_segments * SEGMENT_ROWS].reshape(n_segments, SEGMENT_ROWS).max(axis=1)
    # The k-th highest of these maxima: at least k rows reach it, so no lower score is among the k best.
    threshold = np.partition(maxima, n_segments - k)[n_segments - k]
    if threshold <= 0:
        return np.flatnonzero(scores > 0)
    return np.flatnonzero(scores >= threshold)


class Bm25Retriever:
    """Finds passages that share words with the query, ranked by BM25 score.

    There may be fewer than `k` such passages.

    Args:
        matrix: A `bm25s.BM25` index, which holds the score of each term in each passage.
        passages: The passages, in the order of the rows of `matrix`.
        tokenizer: The tokenizer that the index was built with. It splits the queries in the same way.
        fingerprint: A hash that identifies the documents and the settings of the index.

    Attributes:
        folder: The index folder, from which another process can open the same index; None if it is only in memory.
    """

    name = "bm25"
    folder: Path | None = None

    def __init__(self, matrix: Any, passages: Sequence[Passage], *, tokenizer: Tokenizer, fingerprint: str):
        self._matrix = matrix
        self._passages = passages
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages for each query, best first."""
        check_k(k)
        return [read_hits(self._passages, self._find_hits(query, k)) for query in queries]

    def _find_hits(self, query: str, k: int) -> NearestHits:
        """Return the rows and scores of the best passages for a query."""
        terms = self._matrix.get_tokens_ids(self._tokenizer(query))
        if not terms:
            return NearestHits(np.zeros(0, np.intp), np.zeros(0, np.float32))
        try:
            scores = self._compute_scores(terms)
        except (IndexError, ValueError) as error:
            raise BrokenIndex(
                f"the BM25 files of the index are damaged ({error}). Rebuild the index with `knowgate index`."
            ) from None
        rows = select_candidate_rows(scores, k)
        return NearestHits(rows, scores[rows]).top(k)

    def _compute_scores(self, terms: Sequence[int]) -> NDArray[np.float32]:
        """Return the score of each passage. A term that the query repeats is looked up only once; bm25s repeats the lookup."""
        matrix = self._matrix.scores
        data, indices, offsets = matrix["data"], matrix["indices"], matrix["indptr"]
        scores = np.zeros(matrix["num_docs"], dtype=np.float32)
        for term, count in itertools.islice(Counter(terms).items(), MAX_QUERY_TERMS):
            slots = slice(offsets[term], offsets[term + 1])
            np.add.at(scores, indices[slots], data[slots] if count == 1 else data[slots] * np.float32(count))
        return scores


def build_bm25_matrix(passages: Iterable[Passage], tokenizer: Tokenizer, scratch: Path) -> Any:
    """Build a `bm25s.BM25` index, which holds the BM25 score of each term in each passage.

    Args:
        passages: The passages to index. They are read once, in order.
        tokenizer: Splits the passages into terms.
        scratch: A folder for intermediate files and the resulting arrays, which are memory-mapped.

    Raises:
        BadInput: The passages contain no words.
    """
    bm25s = import_bm25s()
    postings = Postings(scratch)
    postings.add(tokenizer(format_passage(passage)) for passage in passages)
    if not postings.vocabulary:
        raise BadInput("the documents contain no words to index. Choose documents that contain text.")
    matrix = bm25s.BM25(k1=K1, b=B, method="lucene")
    matrix.scores = postings.compute_scores()
    matrix.vocab_dict = postings.vocabulary
    matrix.unique_token_ids_set = set(postings.vocabulary.values())
    # Other BM25 variants also score terms that a passage lacks. Lucene's variant does not.
    matrix.nonoccurrence_array = None
    return matrix


def import_bm25s() -> Any:
    """Import bm25s without jax.

    If bm25s imported jax, jax would reserve most of the GPU's memory.
    """
    hides_jax = "jax" not in sys.modules
    if hides_jax:
        sys.modules["jax"] = None  # type: ignore[assignment]  # `import jax` now raises ImportError
    try:
        import bm25s
    finally:
        if hides_jax:
            del sys.modules["jax"]
    return bm25s


@dataclass(frozen=True)
class Bm25Params:
    """The contents of `params.index.json`, the settings file of a bm25s index.

    Only values written by knowgate are accepted.
    """

    k1: float
    b: float
    num_docs: NonNegativeInt
    method: Literal["lucene"]
    idf_method: Literal["lucene"]
    dtype: Literal["float32"]
    int_dtype: Literal["int32", "int64"]
    delta: float = 0.5
    backend: Literal["numpy", "auto"] = "numpy"


@dataclass(frozen=True)
class Bm25Vocabulary:
    """The contents of `vocab.index.json`, which maps each term to its column in the score matrix."""

    words: dict[str, NonNegativeInt]


def load_bm25_matrix(folder: Path) -> Any:
    """Check the files of a saved `bm25s.BM25` index and open it with memory maps.

    Raises:
        BadInput: A file is damaged.
        OSError: A file is missing or cannot be read.
    """
    bm25s = import_bm25s()

    params = read_record(Bm25Params, read_json(folder / "params.index.json"), "params.index.json", ignore_unknown=True)
    vocabulary = read_record(Bm25Vocabulary, {"words": read_json(folder / "vocab.index.json")}, "vocab.index.json")
    _check_arrays(folder, n_passages=params.num_docs, last_term=max(vocabulary.words.values(), default=-1))
    # The vocabulary has been read and checked above, so bm25s must not read the file again.
    matrix = bm25s.BM25.load(folder, mmap=True, show_progress=False, load_vocab=False)
    matrix.vocab_dict = dict(vocabulary.words)
    matrix.unique_token_ids_set = set(vocabulary.words.values())
    return matrix


def _check_arrays(folder: Path, n_passages: int, last_term: int) -> None:
    """Raise BadInput unless the three arrays of the score matrix fit together.

    The scores of term `t` are `data[starts[t]:starts[t + 1]]`.

    Args:
        folder: The folder with the arrays.
        n_passages: The number of passages in the index.
        last_term: The highest number of a term in the vocabulary.
    """
    data = read_array(folder / "data.csc.index.npy", kind=np.floating, axes=1)
    rows = read_array(folder / "indices.csc.index.npy", kind=np.integer, axes=1)
    starts = read_array(folder / "indptr.csc.index.npy", kind=np.integer, axes=1)
    is_increasing = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
    has_equal_lengths = is_increasing and int(starts[-1]) == len(data) == len(rows)
    if not has_equal_lengths or last_term >= len(starts) - 1:
        raise BadInput("the BM25 arrays (data, indices, indptr) do not match each other.")
    is_scanned = 0 < len(rows) <= MAX_SCANNED_VALUES  # scanning more would delay the start by seconds
    if is_scanned and (int(rows.min()) < 0 or int(rows.max()) >= n_passages):
        raise BadInput(f"the BM25 arrays refer to more passages than the {n_passages} of the index.")
