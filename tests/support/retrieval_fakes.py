"""Fakes shared by the retrieval tests."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from knowgate.retrieval.bm25 import Bm25Retriever, build_bm25_matrix
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Passage, Vector


class CountingEmbedder:
    """Returns a random unit vector seeded by the hash of the text; records all texts in `seen`."""

    spec = "counting"

    def __init__(self, width: int = 8, fingerprint: str = "counting-8"):
        self.width = width
        self.fingerprint = fingerprint
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vector:
        self.seen += texts
        return np.stack([self.vector(text) for text in texts])

    def vector(self, text: str) -> Vector:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        drawn = np.random.default_rng(seed).normal(size=self.width)
        return (drawn / np.linalg.norm(drawn)).astype(np.float32)


class FixedRetriever:
    """Returns the same ranking for every query."""

    name = "fixed"

    def __init__(self, *ids: str):
        self.fingerprint = "+".join(ids)
        self.ids = ids

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage(name, f"text of {name}", score=1.0) for name in self.ids[:k]] for _ in queries]


def write_records(path: Path, texts: dict[str, str]) -> Path:
    lines = [json.dumps({"id": name, "title": "", "text": text}) for name, text in texts.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def unit_vectors(n: int, width: int = 8) -> Vector:
    drawn = np.random.default_rng(0).normal(size=(n, width)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def build_bm25(passages: Sequence[Passage], *, stem: bool | None = None) -> Bm25Retriever:
    """Return a retriever over passages in memory; stems words by default if PyStemmer is installed."""
    tokenizer = Tokenizer(can_stem() if stem is None else stem)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # the arrays stay mapped
        matrix = build_bm25_matrix(passages, tokenizer, Path(scratch))
    return Bm25Retriever(matrix, passages, tokenizer=tokenizer, fingerprint="memory")
