"""Learn-then-Test with a fixed sequence: the laxest threshold that is proven to lose little.

harm_i = 1 where the open-book answer is right and the closed-book one wrong. Skipping iff need <= t loses at most
R(t) = E[skip * harm] accuracy against always retrieving. Thresholds are tested from strict to lax; p(t) is the
probability of so few harmed skips if R(t) were epsilon, i.e. the binomial CDF. The walk stops at the first p(t) above
delta; the threshold before it has R <= epsilon with probability at least 1 - delta over the draw of the questions.

With an arbiter a question that is retrieved for can be harmed, too: where it gives a wrong answer from memory. Skipping
would harm the same question, so that the risk still only grows with the threshold; but always retrieving has one, too.

That is the form 'harm', which ignores answers gained. The form 'net' bounds accuracy lost with gains counted, which
allows far more skipping: the same walk with the p-values of `net_loss`. It is not monotone, and need not be.

Reference: Angelopoulos, Bates, Candes, Jordan, Lei 2021, "Learn then Test", section 3 (binomial p-values for binary
losses; fixed-sequence testing needs no correction for the number of thresholds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates import ALWAYS
from knowgate.statistics import Bools, Floats
from knowgate.thresholds.net_loss import net_p_value, net_rows_needed
from knowgate.thresholds.outcomes import Outcomes

# Fixed beforehand, so it cannot depend on the questions; a finer grid costs a fixed sequence nothing.
GRID: Floats = np.concatenate([[ALWAYS], np.arange(1001) / 1000])

SMALLEST = 1e-9  # loss that could ever be shown: that takes three billion questions


Form = Literal["harm", "net"]


@dataclass(frozen=True)
class Guarantee:
    """threshold: the laxest proven one that skips anything, else ALWAYS. harmed, gained, p_value: at that threshold.

    proven: whether anything is; False where not even always retrieving is shown to lose so little, with this arbiter.
    """

    threshold: float
    epsilon: float
    delta: float
    n: int
    harmed: int
    p_value: float
    form: Form = "harm"
    gained: int = 0
    proven: bool = True


def learn_then_test(
    outcomes: Outcomes, epsilon: float, delta: float, grid: Floats = GRID, form: Form = "harm"
) -> Guarantee:
    """The last threshold of the walk. With fewer than `rows_needed` questions the first test fails already."""
    check_target(epsilon, delta)
    n = len(outcomes)
    harmed, gained = harmed_by(outcomes, grid), gained_by(outcomes, grid)
    last, p = _walk(n, harmed, gained, Guarantee(ALWAYS, epsilon, delta, n, 0, 1.0, form))
    if not (outcomes.needs <= grid[last]).any():
        last = 0  # a threshold that skips none of these questions is not worth its name
    proven = p[last] <= delta or outcomes.given_right is None  # always retrieving loses nothing against itself
    return Guarantee(
        float(grid[last]), epsilon, delta, n, int(harmed[last]), p[last], form, int(gained[last]), bool(proven)
    )


def _walk(n: int, harmed: Any, gained: Any, target: Guarantee) -> tuple[int, list[float]]:
    """Which threshold is the last before the first p-value above delta, and the p-values up to there.

    Before the first threshold there is only: always retrieve.
    """
    if target.form == "harm":
        p = [float(value) for value in p_values(harmed, n, target.epsilon)]
        failed = next((place for place, value in enumerate(p) if value > target.delta), len(p))
        return max(0, failed - 1), p
    p = []
    for lost, won in zip(harmed.tolist(), gained.tolist(), strict=True):
        p.append(net_p_value(lost, won, n, target.epsilon, target.delta))
        if p[-1] > target.delta:
            return max(0, len(p) - 2), p
    return len(p) - 1, p


def harmed_by(outcomes: Outcomes, grid: Floats) -> Any:
    """How many questions each threshold loses: always retrieving has them right."""
    return _counted(outcomes.needs, outcomes.harmed, outcomes.harmed_anyway, grid)


def gained_by(outcomes: Outcomes, grid: Floats) -> Any:
    """How many questions each threshold gains: always retrieving has them wrong."""
    wrong = ~outcomes.open_right
    return _counted(outcomes.needs, outcomes.closed_right & wrong, outcomes.after & wrong, grid)


def _counted(needs: Floats, if_skipped: Bools, if_retrieved: Bools, grid: Floats) -> Any:
    """Questions for which the one holds and which a threshold skips, or the other and which it retrieves for."""
    skipped = np.searchsorted(np.sort(needs[if_skipped]), grid, side="right")
    retrieved = if_retrieved.sum() - np.searchsorted(np.sort(needs[if_retrieved]), grid, side="right")
    return skipped + retrieved


def p_values(harmed: Any, n: int, epsilon: float) -> Floats:
    """P(at most so many harmed skips among n questions), if each were one with probability epsilon."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as error:
        raise MissingExtra("a guarantee", "train") from error
    p: Floats = binom.cdf(harmed, n, epsilon)
    return p


def rows_needed(epsilon: float, delta: float, form: Form = "harm") -> int:
    """The fewest questions that can prove anything: (1 - epsilon)^n <= delta with no harm seen at all."""
    check_target(epsilon, delta)
    if form == "net":
        return net_rows_needed(epsilon, delta)
    return math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)  # 2.0000000001 is 2


def check_target(epsilon: float, delta: float) -> None:
    if not SMALLEST <= epsilon < 1:
        raise BadSetting(f"the largest loss is {epsilon}; it must be above 0 and below 1 (0.02 is two points).")
    if not 0 < delta < 1:
        raise BadSetting(f"the confidence is {1 - delta:g}; it must be above 0 and below 1 (0.95 is usual).")
