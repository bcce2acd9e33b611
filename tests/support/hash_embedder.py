"""An embedding without a model: texts that share words are near each other."""

from __future__ import annotations

import hashlib

import numpy as np

from knowgate.core.text import tokenize


class HashEmbedder:
    """Each word is a fixed random direction; a text is their normalised sum."""

    def __init__(self, width: int = 64, fingerprint: str = "hash"):
        self.width = width
        self.fingerprint = fingerprint

    def embed(self, texts):
        return np.stack([self._one(text) for text in texts]).astype(np.float32)

    def _one(self, text):
        total = np.full(self.width, 1e-3)
        for word in tokenize(text):
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
            total = total + np.random.default_rng(seed).standard_normal(self.width)
        return total / np.linalg.norm(total)
