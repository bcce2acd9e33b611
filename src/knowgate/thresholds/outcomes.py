"""What a threshold does to questions whose two answers are graded. Counts only; no statistics, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput
from knowgate.files import sha256_text

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Outcomes:
    """Needs of questions, and whether their closed-book and open-book answers are right."""

    needs: Floats
    closed: Bools
    opened: Bools

    def __post_init__(self) -> None:
        if not len(self.needs) == len(self.closed) == len(self.opened):
            raise BadInput(
                f"there are {len(self.needs)} needs, {len(self.closed)} closed-book and {len(self.opened)} open-book "
                "verdicts: give one of each per question."
            )

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def harmed(self) -> Bools:
        """Skipping the question would lose a right answer: open-book right, closed-book wrong."""
        return self.opened & ~self.closed

    def at(self, places: Bools) -> Outcomes:
        return Outcomes(self.needs[places], self.closed[places], self.opened[places])


@dataclass(frozen=True)
class ThresholdResult:
    """Counts under one threshold. `right`: with the gate; `harmed`: skipped although only retrieval was right."""

    n: int
    retrieved: int
    right: int
    right_always: int
    right_never: int
    harmed: int

    @property
    def rate(self) -> float:
        return self.retrieved / self.n

    @property
    def accuracy(self) -> float:
        return self.right / self.n

    @property
    def loss(self) -> float:
        """Accuracy lost against always retrieving; negative where skipping gains. Never above harmed / n."""
        return (self.right_always - self.right) / self.n

    def record(self) -> dict[str, Any]:
        """Counts and the shares people ask for, as plain data."""
        shares = {"rate": self.rate, "accuracy": self.accuracy, "loss": self.loss, "risk": self.harmed / self.n}
        return {**asdict(self), **{name: round(value, 6) for name, value in shares.items()}}


def reached(outcomes: Outcomes, threshold: float) -> ThresholdResult:
    """What the gate would have done to these questions."""
    if not len(outcomes):
        raise BadInput("there are no questions to try a threshold on.")
    retrieve = outcomes.needs > threshold
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(np.where(retrieve, outcomes.opened, outcomes.closed).sum()),
        right_always=int(outcomes.opened.sum()),
        right_never=int(outcomes.closed.sum()),
        harmed=int((outcomes.harmed & ~retrieve).sum()),
    )


def held_out(keys: Sequence[str], share: float, seed: int = 0) -> Bools:
    """Which questions are kept back, by a hash of each.

    The hash is salted: with that of `fit`, questions that a fit left aside for its test would all fall on one side.
    """
    places = [int(sha256_text("calibrate", str(seed), key)[:12], 16) / 16**12 for key in keys]
    return np.array(places) < share
