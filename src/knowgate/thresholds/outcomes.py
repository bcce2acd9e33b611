"""What a threshold does to questions whose two answers are graded. Counts only; no statistics, no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadInput
from knowgate.statistics import Bools, Floats


@dataclass(frozen=True)
class Outcomes:
    """Needs of questions, and whether their closed-book and open-book answers are right.

    given_right: whether what an arbiter gives after retrieval is; None where that is the open-book answer.
    """

    needs: Floats
    closed_right: Bools
    open_right: Bools
    given_right: Bools | None = None

    def __post_init__(self) -> None:
        if not len(self.needs) == len(self.closed_right) == len(self.open_right) == len(self.after):
            raise BadInput(
                f"there are {len(self.needs)} needs, {len(self.closed_right)} closed-book and {len(self.open_right)} "
                "open-book verdicts: give one of each per question."
            )

    def __len__(self) -> int:
        return len(self.needs)

    @property
    def after(self) -> Bools:
        """Whether the answer after retrieval is right."""
        return self.open_right if self.given_right is None else self.given_right

    @property
    def harmed(self) -> Bools:
        """Skipping the question would lose a right answer: open-book right, closed-book wrong."""
        return self.open_right & ~self.closed_right

    @property
    def harmed_anyway(self) -> Bools:
        """Retrieving loses it, too: the arbiter gives the wrong answer from memory. Always among `harmed`."""
        return self.open_right & ~self.after

    def at(self, rows: Bools) -> Outcomes:
        """Of some of the questions."""
        given = None if self.given_right is None else self.given_right[rows]
        return Outcomes(self.needs[rows], self.closed_right[rows], self.open_right[rows], given)


@dataclass(frozen=True)
class ThresholdResult:
    """Counts under one threshold. `right`: with the gate, and the arbiter where there is one.

    harmed: wrong although always retrieving is right; gained: the other way round. right_chosen: always retrieving and
    then choosing, None without an arbiter.
    """

    n: int
    retrieved: int
    right: int
    right_always: int
    right_never: int
    harmed: int
    gained: int = 0
    right_chosen: int | None = None

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
        raise BadInput("there are no questions to try a threshold on. Label some: knowgate label")
    retrieve = outcomes.needs > threshold
    right = np.where(retrieve, outcomes.after, outcomes.closed_right)
    return ThresholdResult(
        n=len(outcomes),
        retrieved=int(retrieve.sum()),
        right=int(right.sum()),
        right_always=int(outcomes.open_right.sum()),
        right_never=int(outcomes.closed_right.sum()),
        harmed=int((outcomes.open_right & ~right).sum()),
        gained=int((right & ~outcomes.open_right).sum()),
        right_chosen=None if outcomes.given_right is None else int(outcomes.after.sum()),
    )
