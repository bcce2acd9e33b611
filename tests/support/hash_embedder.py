"""An embedding model without weights: texts that share words are near each other."""

from __future__ import annotations

import hashlib

import numpy as np

from knowgate.core.text import tokenize


class HashEmbedder:
    """Maps each word to a fixed random direction and a text to their normalized sum."""

    def __init__(self, width: int = 64, fingerprint: str = "hash"):
        self.width = width
        self.fingerprint = fingerprint

    def embed(self, texts):
        return np.stack([self._embed(text) for text in texts]).astype(np.float32)

    def _embed(self, text):
        total = np.full(self.width, 1e-3)
        for word in tokenize(text):
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
            total = total + np.random.default_rng(seed).standard_normal(self.width)
        return total / np.linalg.norm(total)
