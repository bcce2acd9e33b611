"""What a threshold does to questions whose two answers are graded. Counts only; no statistics, no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadInput
from knowgate.statistics import Bools, Floats


@dataclass(frozen=True)
class Outcomes:
    """Needs of questions, and whether their closed-book and open-book answers are right."""

    needs: Floats
    closed_right: Bools
    open_right: Bools

    def __post_init__(self) -> None:
        if not len(self.needs) == len(self.closed_right) == len(self.open_right):
            raise BadInput(
                f"there are {len(self.needs)} needs, {len(self.closed_right)} closed-book and {len(self.open_right)} "
                "open-book verdicts: give one of each per question."
            )

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def harmed(self) -> Bools:
        """Skipping the question would lose a right answer: open-book right, closed-book wrong."""
        return self.open_right & ~self.closed_right

    def at(self, rows: Bools) -> Outcomes:
        """Of some of the questions."""
        return Outcomes(self.needs[rows], self.closed_right[rows], self.open_right[rows])


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


def try_threshold(outcomes: Outcomes, threshold: float) -> ThresholdResult:
    """What the gate would have done to these questions."""
    if not len(outcomes):
        raise BadInput("there are no questions to try a threshold on.")
    retrieve = outcomes.needs > threshold
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(np.where(retrieve, outcomes.open_right, outcomes.closed_right).sum()),
        right_always=int(outcomes.open_right.sum()),
        right_never=int(outcomes.closed_right.sum()),
        harmed=int((outcomes.harmed & ~retrieve).sum()),
    )
