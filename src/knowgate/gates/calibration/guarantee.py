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

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.threshold_choice import GateOutcomes
from knowgate.stats.metrics import BoolArray, FloatArray

NUISANCE_SHARE = 0.02  # of the error that is spent on q lying above its limit
NUISANCE_STEPS = 7  # values of q that are tried; the p-value rises smoothly with q


@functools.lru_cache(maxsize=1 << 16)
def compute_net_p_value(lost: int, gained: int, n: int, epsilon: float, delta: float) -> float:
    """P(lost - gained as small as this or smaller), if the mean were epsilon, whatever the share of discordant ones."""
    spent = NUISANCE_SHARE * delta
    shares = np.linspace(epsilon, max(_upper_limit(lost + gained, n, spent), epsilon), NUISANCE_STEPS)[:, None]
    m = _likely(n, float(shares[0, 0]), float(shares[-1, 0]))
    at_most = _binomial_cdf(np.floor((m + lost - gained) / 2), m, np.minimum(1.0, (shares + epsilon) / (2 * shares)))
    found: FloatArray = (_binomial_pmf(m, n, shares) * at_most).sum(axis=1)
    return min(1.0, float(found.max()) + spent)


def _likely(n: int, low: float, high: float) -> FloatArray:
    """Numbers of discordant questions among n, up to some of a probability below 1e-14."""
    first = n * low - 8 * math.sqrt(n * low) - 1
    last = n * high + 8 * math.sqrt(n * high) + 20
    return np.arange(max(0, math.floor(first)), min(n, math.ceil(last)) + 1, dtype=np.float64)


def _upper_limit(hits: int, n: int, error: float) -> float:
    """Clopper and Pearson's one-sided limit of a share."""
    return 1.0 if hits >= n else float(_special().betaincinv(hits + 1, n - hits, 1 - error))


def _binomial_pmf(k: FloatArray, n: int, p: FloatArray) -> FloatArray:
    special = _special()
    ways = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    found: FloatArray = np.exp(ways + special.xlogy(k, p) + special.xlog1py(n - k, -p))
    return found


def _binomial_cdf(k: FloatArray, n: FloatArray, p: FloatArray) -> FloatArray:
    """P(at most k hits of n); below 0 none, from n on certain."""
    inside = (k >= 0) & (k < n)
    found: FloatArray = _special().betainc(np.where(inside, n - k, 1.0), np.where(inside, k + 1, 1.0), 1 - p)
    return np.where(inside, found, (k >= n).astype(float))


def compute_net_required_rows(epsilon: float, delta: float) -> int:
    """The fewest questions that can prove anything with nothing lost and nothing gained."""
    n = 1
    while compute_net_p_value(0, 0, n, epsilon, delta) > delta:
        n *= 2
    low, high = n // 2, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_net_p_value(0, 0, middle, epsilon, delta) <= delta else (middle, high)
    return high


@functools.cache
def _special() -> Any:
    try:
        from scipy import special
    except ModuleNotFoundError as error:
        raise MissingExtra("a guarantee", "train") from error
    return special


# Fixed beforehand, so it cannot depend on the questions; a finer grid costs a fixed sequence nothing.
THRESHOLD_GRID: FloatArray = np.concatenate([[ALWAYS_RETRIEVE], np.arange(1001) / 1000])

MIN_LOSS = 1e-9  # loss that could ever be shown: that takes three billion questions


LossForm = Literal["harm", "net"]


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
    form: LossForm = "harm"
    gained: int = 0
    proven: bool = True


def learn_then_test(
    outcomes: GateOutcomes, epsilon: float, delta: float, grid: FloatArray = THRESHOLD_GRID, form: LossForm = "harm"
) -> Guarantee:
    """The last threshold of the walk. With fewer than `rows_needed` questions the first test fails already."""
    check_loss_and_confidence(epsilon, delta)
    n = len(outcomes)
    harmed, gained = count_harmed(outcomes, grid), count_gained(outcomes, grid)
    last, p = _walk(n, harmed, gained, Guarantee(ALWAYS_RETRIEVE, epsilon, delta, n, 0, 1.0, form))
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
        p = [float(value) for value in compute_harm_p_values(harmed, n, target.epsilon)]
        failed = next((place for place, value in enumerate(p) if value > target.delta), len(p))
        return max(0, failed - 1), p
    p = []
    for lost, won in zip(harmed.tolist(), gained.tolist(), strict=True):
        p.append(compute_net_p_value(lost, won, n, target.epsilon, target.delta))
        if p[-1] > target.delta:
            return max(0, len(p) - 2), p
    return len(p) - 1, p


def count_harmed(outcomes: GateOutcomes, grid: FloatArray) -> Any:
    """How many questions each threshold loses: always retrieving has them right."""
    return _counted(outcomes.needs, outcomes.harmed, outcomes.harmed_anyway, grid)


def count_gained(outcomes: GateOutcomes, grid: FloatArray) -> Any:
    """How many questions each threshold gains: always retrieving has them wrong."""
    wrong = ~outcomes.open_right
    return _counted(outcomes.needs, outcomes.closed_right & wrong, outcomes.after & wrong, grid)


def _counted(needs: FloatArray, if_skipped: BoolArray, if_retrieved: BoolArray, grid: FloatArray) -> Any:
    """Questions for which the one holds and which a threshold skips, or the other and which it retrieves for."""
    skipped = np.searchsorted(np.sort(needs[if_skipped]), grid, side="right")
    retrieved = if_retrieved.sum() - np.searchsorted(np.sort(needs[if_retrieved]), grid, side="right")
    return skipped + retrieved


def compute_harm_p_values(harmed: Any, n: int, epsilon: float) -> FloatArray:
    """P(at most so many harmed skips among n questions), if each were one with probability epsilon."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as error:
        raise MissingExtra("a guarantee", "train") from error
    p: FloatArray = binom.cdf(harmed, n, epsilon)
    return p


def compute_required_rows(epsilon: float, delta: float, form: LossForm = "harm") -> int:
    """The fewest questions that can prove anything: (1 - epsilon)^n <= delta with no harm seen at all."""
    check_loss_and_confidence(epsilon, delta)
    if form == "net":
        return compute_net_required_rows(epsilon, delta)
    return math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)  # 2.0000000001 is 2


def check_loss_and_confidence(epsilon: float, delta: float) -> None:
    if not MIN_LOSS <= epsilon < 1:
        raise BadSetting(f"the largest loss is {epsilon}; it must be above 0 and below 1 (0.02 is two points).")
    if not 0 < delta < 1:
        raise BadSetting(f"the confidence is {1 - delta:g}; it must be above 0 and below 1 (0.95 is usual).")
