"""Thresholds with a guarantee: Learn-then-Test with a fixed sequence.

A question is harmed if its open-book answer is right and its closed-book answer wrong. Skipping iff need <= t loses at
most R(t) = P(skipped and harmed) accuracy against always retrieving. Thresholds are tested from strict to lax; p(t) is
the probability of so few harmed skips if R(t) were epsilon, i.e. the binomial CDF. The walk stops at the first p(t)
above delta. The threshold before it has R <= epsilon with probability at least 1 - delta over the draw of questions.

With an arbiter, a retrieved question can be harmed too, if the arbiter gives a wrong closed-book answer. Skipping would
harm the same question, so that the risk still increases with the threshold; but always retrieving has a risk as well.

This is the form 'harm', which ignores gained answers. The form 'net' bounds the accuracy lost with gains counted, which
allows far more skipping. It is the same walk with the p-values of an exact test of a three-valued mean: the net loss of
a question is 1 if only always retrieving is right, -1 if only the gate is right, else 0. If the mean is epsilon and a
share q of the questions is discordant (not 0), the number of discordant questions is binomial, and so are the lost ones
among them. q is unknown, so the p-value is the maximum over all q up to an upper confidence limit, plus the probability
that q is above it (Berger and Boos 1994, "P values maximized over a confidence set for the nuisance parameter").

Tests of bounded means work for any loss and need more rows: with 1,500 questions of which 6 % are lost and 6 % gained,
Hoeffding-Bentkus shows a loss of at most .055, betting (Waudby-Smith and Ramdas 2024) of .028, this test of .017.

Reference: Angelopoulos, Bates, Candes, Jordan, Lei 2021, "Learn then Test", section 3 (binomial p-values for binary
losses; fixed-sequence testing needs no correction for the number of thresholds).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.errors import BadSetting, require_extra
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.artifacts.gate_manifest import LossForm, LossTest
from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    IntArray,
    count_gained,
    count_harmed,
    find_smallest_count,
)
from knowgate.stats.metrics import FloatArray

# Fixed in advance, so that it does not depend on the questions. A finer grid costs a fixed sequence nothing.
THRESHOLD_GRID: FloatArray = np.concatenate([[ALWAYS_RETRIEVE], np.arange(1001) / 1000])
MIN_LOSS = 1e-9  # to prove less would take three billion questions
NUISANCE_SHARE = 0.02  # share of delta that is spent on q being above its limit
NUISANCE_STEPS = 7  # values of q to try; the p-value increases smoothly with q


@dataclass(frozen=True, kw_only=True)
class Guarantee(LossTest):
    """A threshold proven to lose little accuracy against always retrieving, with the test result.

    Attributes:
        threshold: The highest proven threshold; ALWAYS_RETRIEVE if no proven threshold skips any question.
        n: Number of questions it was proven on.
    """

    threshold: float
    n: int


def learn_then_test(
    outcomes: GateOutcomes, epsilon: float, delta: float, grid: FloatArray = THRESHOLD_GRID, form: LossForm = "harm"
) -> Guarantee:
    """Find the highest threshold that is proven to lose little accuracy against always retrieving.

    If no threshold is proven, the result is to always retrieve.

    Args:
        outcomes: Needs for retrieval of the questions, and whether their answers are right.
        epsilon: Maximum loss of accuracy against always retrieving.
        delta: Maximum probability that the guarantee is wrong.
        grid: Thresholds to test, in increasing order and starting with ALWAYS_RETRIEVE.
        form: 'harm' counts only the right answers that are lost, 'net' also subtracts the right answers that are gained.
    """
    check_loss_and_confidence(epsilon, delta)
    n = len(outcomes)
    harmed = count_harmed(outcomes, grid)  # number of questions at each threshold
    gained = count_gained(outcomes, grid)
    if form == "harm":
        p_values = compute_harm_p_values(harmed, n, epsilon).tolist()
    else:
        p_values = _walk_net_p_values(harmed, gained, n, epsilon, delta)
    index = _find_last_passing(p_values, delta)
    if not (outcomes.needs <= grid[index]).any():
        index = 0  # a threshold that skips no question is reported as "always retrieve"
    # Without an arbiter, always retrieving loses nothing against itself.
    proven = p_values[index] <= delta or outcomes.arbitrated_right is None
    return Guarantee(
        threshold=float(grid[index]), epsilon=epsilon, delta=delta, n=n, p_value=p_values[index], form=form,
        harmed=int(harmed[index]), gained=int(gained[index]), proven=proven,
    )  # fmt: skip


def _find_last_passing(p_values: Sequence[float], delta: float) -> int:
    """Return the index of the last p-value before the first one above delta.

    If already the first p-value is above delta, the result is 0, too, which means to always retrieve.
    """
    passed = list(itertools.takewhile(lambda p_value: p_value <= delta, p_values))
    return max(0, len(passed) - 1)


def _walk_net_p_values(harmed: IntArray, gained: IntArray, n: int, epsilon: float, delta: float) -> list[float]:
    """Compute p-values of the net loss, threshold by threshold. The list ends with the first p-value above delta.

    Args:
        harmed: For each threshold, the number of questions that are answered right with always retrieving, but wrong
            with the gate.
        gained: For each threshold, the number of questions that are answered wrong with always retrieving, but right
            with the gate.
        n: Number of questions.
        epsilon: Net loss to test against, as a share of the questions.
        delta: Maximum probability that the guarantee is wrong.
    """
    p_values: list[float] = []
    for n_harmed, n_gained in zip(harmed.tolist(), gained.tolist(), strict=True):
        p_values.append(compute_net_p_value(n_harmed, n_gained, n, epsilon, delta))
        if p_values[-1] > delta:
            break
    return p_values


def compute_harm_p_values(harmed: IntArray, n: int, epsilon: float) -> FloatArray:
    """Compute a p-value per threshold. A small p-value shows a share of harmed questions below epsilon.

    Args:
        harmed: Number of harmed questions at each threshold.
        n: Number of questions.
        epsilon: Maximum loss of accuracy.
    """
    with require_extra("a guarantee", "train"):
        from scipy.stats import binom
    return np.asarray(binom.cdf(harmed, n, epsilon))


def compute_required_rows(epsilon: float, delta: float, form: LossForm = "harm") -> int:
    """Compute the minimum number of questions for proving a guarantee.

    The best case is assumed: no right answer is lost.

    Args:
        epsilon: Maximum loss of accuracy against always retrieving.
        delta: Maximum probability that the guarantee is wrong.
        form: 'harm' counts only the right answers that are lost, 'net' also subtracts the right answers that are gained.
    """
    check_loss_and_confidence(epsilon, delta)
    if form == "net":
        return find_smallest_count(lambda n: compute_net_p_value(0, 0, n, epsilon, delta) <= delta)
    # The smallest n with (1 - epsilon)^n <= delta.
    return math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)  # a rounding error must not add a question


def check_loss_and_confidence(epsilon: float, delta: float) -> None:
    """Raise BadSetting if the maximum loss or the confidence is out of range."""
    if not MIN_LOSS <= epsilon < 1:
        raise BadSetting(
            f"max_loss={epsilon} is not allowed: it must be above 0 and below 1. Example: 0.02 means two percentage points."
        )
    if not 0 < delta < 1:
        raise BadSetting(
            f"confidence={1 - delta:g} is not allowed: it must be above 0 and below 1. The usual value is 0.95."
        )


# --- net loss -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 16)
def compute_net_p_value(lost: int, gained: int, n: int, epsilon: float, delta: float) -> float:
    """Compute a p-value of the net loss (lost minus gained). A small p-value shows a net loss below epsilon.

    The true share of changed (lost or gained) questions is unknown. For each plausible share, the probability of a net
    loss as small as observed is computed, as if the true net loss were epsilon. The p-value is the largest of these
    probabilities, plus the probability that the true share is not plausible.

    Args:
        lost: Number of questions that are answered right with always retrieving, but wrong with the gate.
        gained: Number of questions that are answered wrong with always retrieving, but right with the gate.
        n: Number of all questions.
        epsilon: Net loss to test against, as a share of all questions.
        delta: Maximum probability that the guarantee is wrong.
    """
    with require_extra("a guarantee", "train"):
        from scipy.stats import beta, binom
    # Shares up to the upper confidence limit of Clopper and Pearson are plausible. The true share is above this limit
    # with probability `p_implausible`.
    p_implausible = NUISANCE_SHARE * delta
    changed = lost + gained
    limit = 1.0 if changed >= n else max(float(beta.ppf(1 - p_implausible, changed + 1, n - changed)), epsilon)
    shares = np.linspace(epsilon, limit, NUISANCE_STEPS)[:, None]  # one row per plausible share
    n_changed = _list_likely_counts(n, epsilon, limit)  # one column per likely number of changed questions
    # If a share s is changed and the net loss is epsilon, (s + epsilon) / 2 is lost and (s - epsilon) / 2 gained.
    p_lost = np.minimum(1.0, (shares + epsilon) / (2 * shares))  # that a changed question is lost, not gained
    # With x lost questions, the net loss is x - (n_changed - x). It is at most the observed lost - gained up to this x.
    most_lost = np.floor((n_changed + lost - gained) / 2)
    p_as_small = binom.cdf(most_lost, n_changed, p_lost)
    p_values: FloatArray = (binom.pmf(n_changed, n, shares) * p_as_small).sum(axis=1)
    return min(1.0, float(p_values.max()) + p_implausible)


def _list_likely_counts(n: int, low: float, high: float) -> FloatArray:
    """List the values that a binomial variable takes with noticeable probability.

    Args:
        n: Number of trials.
        low: Lowest success probability.
        high: Highest success probability.
    """
    # Eight standard deviations around the mean. The constants give more room where the mean is near 0.
    first = n * low - 8 * math.sqrt(n * low) - 1
    last = n * high + 8 * math.sqrt(n * high) + 20
    return np.arange(max(0, math.floor(first)), min(n, math.ceil(last)) + 1, dtype=np.float64)
