"""Questions told apart and divided by a hash of their text, so that equal questions stay together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.files import sha256_text
from knowgate.text import normalise

SHARES = {"train": 0.6, "dev": 0.1, "calibration": 0.15, "test": 0.15}


def seen_key(question: str) -> str:
    """A question's fingerprint, kept so that nobody evaluates a gate on what it was fitted on."""
    return sha256_text(normalise(question) or question)[:12]


@dataclass(frozen=True)
class Split:
    """Row numbers of each part; no question is in two."""

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SHARES}


def split_questions(texts: Sequence[str], seed: int) -> Split:
    """By a hash of the question, so equal questions go together and a row's part does not depend on the others."""
    places = np.array([int(sha256_text(str(seed), seen_key(text))[:12], 16) / 16**12 for text in texts])
    edges = np.cumsum(list(SHARES.values()))[:-1]
    part = np.searchsorted(edges, places, side="right")
    return Split(*(np.flatnonzero(part == number) for number in range(len(SHARES))))
