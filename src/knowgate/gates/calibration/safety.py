"""Net loss of a decision rule against always retrieving, and the limits within which it counts as safe.

A question is lost if only always retrieving answers it right, and gained if only the rule does. The net loss is the
share of lost minus the share of gained questions. A rule is safe if its net loss, on questions that it was not fitted
on, is small and its upper confidence limit is not large either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from pydantic import Field

from knowgate.core.options import Options
from knowgate.stats.metrics import BoolArray

MAX_REQUIRED_ROWS = 1_000_000  # more rows than anybody labels


class SafetyLimits(Options):
    """How much accuracy a threshold may lose against always retrieving to be used by default."""

    max_loss: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Largest estimated loss of accuracy against always retrieving that a threshold may have.",
    )
    loss_bound: float = Field(
        default=0.03,
        gt=0,
        lt=1,
        description="Largest upper confidence limit (95 %) of that loss that a threshold may have.",
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Confidence of the upper limit.")

    def accepts(self, loss: NetLoss) -> bool:
        """Return whether the estimated loss and its upper confidence limit are within the limits."""
        return loss.mean <= self.max_loss + 1e-9 and loss.upper(self.confidence) <= self.loss_bound + 1e-9


@dataclass(frozen=True)
class NetLoss:
    """How many of `n` questions a rule loses and gains against always retrieving."""

    lost: int
    gained: int
    n: int

    @property
    def mean(self) -> float:
        """Estimated net loss; negative if the rule answers more questions right than always retrieving."""
        return (self.lost - self.gained) / self.n

    def upper(self, confidence: float = 0.95) -> float:
        """Return the one-sided upper confidence limit of the net loss.

        A normal approximation after adding one lost question, which keeps the limit above zero if nothing was lost:
        without lost and gained questions it is 2.6 / n, where the exact limit is 3.0 / n.
        """
        return _upper_limit(self.lost / self.n, self.gained / self.n, self.n, confidence)

    def count_required_rows(self, limits: SafetyLimits) -> int | None:
        """Return how many questions would show that this loss is within the limits.

        Assumes that the shares of lost and gained questions stay as they are. None if no number of questions would do.
        """
        lost, gained = self.lost / self.n, self.gained / self.n
        if lost - gained > min(limits.max_loss + 1e-9, limits.loss_bound - 1e-6):
            return None
        low, high = 0, 1
        while _upper_limit(lost, gained, high, limits.confidence) > limits.loss_bound:
            low, high = high, 2 * high
            if high > MAX_REQUIRED_ROWS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            is_enough = _upper_limit(lost, gained, middle, limits.confidence) <= limits.loss_bound
            low, high = (low, middle) if is_enough else (middle, high)
        return high


def count_net_loss(right: BoolArray, open_right: BoolArray) -> NetLoss:
    """Count the questions that a rule loses and gains against always retrieving.

    Args:
        right: Whether the rule answers each question right.
        open_right: Whether the open-book answer to each question is right.
    """
    return NetLoss(int((open_right & ~right).sum()), int((right & ~open_right).sum()), len(right))


def _upper_limit(lost: float, gained: float, n: int, confidence: float) -> float:
    """Return the upper limit of lost - gained, which are shares among n questions."""
    mean, spread = lost - gained + 1 / n, lost + gained + 1 / n
    return mean + NormalDist().inv_cdf(confidence) * math.sqrt(max(0.0, spread - mean**2) / n)
