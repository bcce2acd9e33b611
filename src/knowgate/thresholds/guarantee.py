"""Learn-then-Test with a fixed sequence: the laxest threshold that is proven to lose little.

harm_i = 1 where the open-book answer is right and the closed-book one wrong. Skipping iff need <= t loses at most
R(t) = E[skip * harm] accuracy against always retrieving. Thresholds are tested from strict to lax; p(t) is the
probability of so few harmed skips if R(t) were epsilon, i.e. the binomial CDF. The walk stops at the first p(t) above
delta; the threshold before it has R <= epsilon with probability at least 1 - delta over the draw of the questions.

Reference: Angelopoulos, Bates, Candes, Jordan, Lei 2021, "Learn then Test", section 3 (binomial p-values for binary
losses; fixed-sequence testing needs no correction for the number of thresholds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates import ALWAYS
from knowgate.statistics import Floats
from knowgate.thresholds.outcomes import Outcomes

# Fixed beforehand, so it cannot depend on the questions; a finer grid costs a fixed sequence nothing.
GRID: Floats = np.concatenate([[ALWAYS], np.arange(1001) / 1000])

SMALLEST = 1e-9  # loss that could ever be shown: that takes three billion questions


@dataclass(frozen=True)
class Guarantee:
    """threshold: the laxest proven one that skips anything, else ALWAYS. harmed, p_value: at that threshold."""

    threshold: float
    epsilon: float
    delta: float
    n: int
    harmed: int
    p_value: float


def learn_then_test(outcomes: Outcomes, epsilon: float, delta: float, grid: Floats = GRID) -> Guarantee:
    """The last threshold of the walk. With fewer than `rows_needed` questions the first test fails already."""
    check_target(epsilon, delta)
    n = len(outcomes)
    counts = harmed_skips(outcomes, grid)
    p = p_values(counts, n, epsilon)
    passed = int(np.argmax(p > delta)) if (p > delta).any() else len(grid)
    last = max(0, passed - 1)  # before the first threshold there is only: always retrieve
    if not (outcomes.needs <= grid[last]).any():
        last = 0  # a threshold that skips none of these questions is not worth its name
    return Guarantee(float(grid[last]), epsilon, delta, n, int(counts[last]), float(p[last]))


def harmed_skips(outcomes: Outcomes, grid: Floats) -> Any:
    """How many questions each threshold skips to their harm."""
    return np.searchsorted(np.sort(outcomes.needs[outcomes.harmed]), grid, side="right")


def p_values(harmed: Any, n: int, epsilon: float) -> Floats:
    """P(at most so many harmed skips among n questions), if each were one with probability epsilon."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as error:
        raise MissingExtra("a guarantee", "train") from error
    p: Floats = binom.cdf(harmed, n, epsilon)
    return p


def rows_needed(epsilon: float, delta: float) -> int:
    """The fewest questions that can prove anything: (1 - epsilon)^n <= delta with no harm seen at all."""
    check_target(epsilon, delta)
    return math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)  # 2.0000000001 is 2


def check_target(epsilon: float, delta: float) -> None:
    if not SMALLEST <= epsilon < 1:
        raise BadSetting(f"the largest loss is {epsilon}; it must be above 0 and below 1 (0.02 is two points).")
    if not 0 < delta < 1:
        raise BadSetting(f"the confidence is {1 - delta:g}; it must be above 0 and below 1 (0.95 is usual).")
