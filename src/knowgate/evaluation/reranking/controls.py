"""Rankers that read no question: what they reach, a preference reaches without being about the question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from knowgate.files import sha256_text
from knowgate.preferences import Preference
from knowgate.types import Passage


class ShortestFirst:
    """Shorter passages first. Whatever it reaches, length alone reaches."""

    name = fingerprint = "shortest first"

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[-float(len(passage.text)) for passage in found] for found in passages]


class PassageMeans:
    """A passage's mean shift over the training questions it was a candidate of; 0 if it was none's."""

    name = "passage means"

    def __init__(self, learnt: Iterable[Preference]):
        shifts: dict[str, list[float]] = {}
        for candidate in (one for row in learnt for one in row.candidates):
            shifts.setdefault(candidate.id, []).append(candidate.shift)
        self.means = {name: float(np.mean(found)) for name, found in shifts.items()}

    @property
    def fingerprint(self) -> str:
        return sha256_text(*(f"{name}={mean!r}" for name, mean in sorted(self.means.items())))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[self.means.get(passage.id, 0.0) for passage in found] for found in passages]

    def seen(self, rows: Iterable[Preference]) -> float:
        """Share of the rows' candidates that training questions had too."""
        known = [candidate.id in self.means for row in rows for candidate in row.candidates]
        return float(np.mean(known)) if known else 0.0
