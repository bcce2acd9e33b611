"""Approximate search for large corpora: an inverted file of faiss (extra `faiss`), built once, then mapped.

Why IVF-Flat: a flat index of faiss is loaded whole and still reads every row; HNSW adds a graph that must stay
in memory and is slow to build. An inverted file is trained on a sample, adds only row numbers to the vectors,
is mapped from disk, and its scores are exact: only rows in lists that are not visited can be missed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.nearest import Hits, scored
from knowgate.types import Vector

ANN_ROWS = 500_000  # exact search takes 15 ms per 100,000 rows of 384 (measured on two ARM cores)
_LISTS_PER_ROOT = 4  # lists = 4 * sqrt(rows), faiss guidelines
_TRAINED_PER_LIST = 64  # k-means of faiss asks for 39 to 256 samples a list
_VISITED = 64
_SPARE = 32
_BLOCK_ROWS = 65_536


def has_faiss() -> bool:
    return importlib.util.find_spec("faiss") is not None


def build_ann(vectors: Vector, path: Path) -> None:
    """Train on a spread of rows, then add all of them block by block."""
    import faiss

    rows, width = vectors.shape
    lists = max(1, int(_LISTS_PER_ROOT * rows**0.5))
    index = faiss.index_factory(width, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    step = max(1, rows // (_TRAINED_PER_LIST * lists))
    index.train(np.ascontiguousarray(vectors[::step]))
    for start in range(0, rows, _BLOCK_ROWS):
        index.add(np.ascontiguousarray(vectors[start : start + _BLOCK_ROWS]))
    faiss.write_index(index, str(path))


class AnnSearch:
    """Looks only into the lists nearest to the query.

    faiss names `_SPARE` rows more than asked for, and the best of them are told apart as exact search does; which of
    more equal rows it names is its own affair.
    """

    def __init__(self, path: Path, vectors: Vector, *, visited: int = _VISITED):
        import faiss

        index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", visited)
        self._index = index
        self._vectors = vectors

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, queries: Vector, k: int) -> list[Hits]:
        _, named = self._index.search(queries, min(k + _SPARE, len(self)))
        rows = [np.sort(row[row >= 0]).astype(np.intp) for row in named]  # -1: none left
        return [scored(self._vectors, some, query).best(k) for some, query in zip(rows, queries, strict=True)]
