"""Confidence sequences and sequential tests, which stay valid if you look at them after every observation.

Observations are numbers between 0 and 1 that arrive one by one. No further assumptions are made.

`MeanConfidenceSequence` bounds the running mean. For each lambda in [0, 1) the process
exp(lambda * sum(x - mean) - psi(lambda) * sum((x - guess)^2)) with psi(lambda) = -log(1 - lambda) - lambda, where each
guess was made before its x, is a supermartingale that starts at 1; so is a mixture over lambdas. By Ville's inequality
it ever reaches 2 / delta with probability at most delta / 2. The two sides together ever miss the running mean with
probability at most delta, also if the mean changes over time.

`GuaranteeTest` collects evidence that the mean is above a guaranteed limit, by betting: capital is multiplied by
1 + bet * (x - limit), which cannot grow in the long run while the guarantee holds. New capital is bet at each step
(1 / (1 + log(1 + t)) of it is left after step t), so that a guarantee that held for weeks and fails from today is
detected without winning back the losses of those weeks. The capital is a supermartingale that starts at 1: while the
guarantee holds, it ever reaches 1 / delta with probability at most delta.

References: Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences",
theorem 4; Waudby-Smith, Ramdas 2024, "Estimating means of bounded random variables by betting"; Shin, Ramdas, Rinaldo
2023, "E-detectors" (new capital at each step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.stats.metrics import FloatArray

# Large lambdas suit means near 0 and 1, small lambdas suit many observations. Each doubling of the number of lambdas
# raises the evidence that a bound needs by log 2.
LAMBDAS: FloatArray = np.array([0.9, 0.6, 0.35, 0.2, 0.1, 0.05, 0.02])
PSI: FloatArray = -np.log1p(-LAMBDAS) - LAMBDAS
BISECTION_STEPS = 40  # to find a bound in an interval of length 1
# The means above the limit that are bet on, by their odds compared with those of the limit: small ratios for small
# drifts (`python -m benchmarks.alarm`), large ones for drifts that should be found within a few observations.
ODDS_RATIOS = (1.25, 1.5, 2.0, 5.0, 20.0, 100.0)


@dataclass
class MeanConfidenceSequence:
    """A running mean with a lower and an upper bound.

    With probability 1 - delta, the bounds are correct at all times.

    Attributes:
        delta: Probability that a bound is ever wrong.
        n: Number of observations.
        total: Sum of the observations.
        variation: Sum of squared differences between each observation and the mean of the observations before it.
    """

    delta: float = 0.05
    n: int = 0
    total: float = 0.0
    variation: float = 0.0

    def __post_init__(self) -> None:
        _check_delta(self.delta)

    def add(self, value: float) -> None:
        """Add an observation between 0 and 1."""
        _check_value(value)
        # The variation compares each observation with a guess made before it: the mean so far, with 0.5 as a start.
        guess = (0.5 + self.total) / (1 + self.n)
        self.variation += (value - guess) ** 2
        self.total += value
        self.n += 1

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None if there are none."""
        return self.total / self.n if self.n else None

    @property
    def low(self) -> float:
        """Lower bound of the mean; 0 without observations."""
        return self._find_lower_bound(self.total)

    @property
    def high(self) -> float:
        """Upper bound of the mean; 1 without observations."""
        return 1.0 - self._find_lower_bound(self.n - self.total)  # the mirror image of the lower bound

    def _find_lower_bound(self, total: float) -> float:
        """Find the lower bound of the mean by bisection, from the sum of observations."""
        if not self.n:
            return 0.0
        low = 0.0
        high = total / self.n
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            if self._is_excluded(total, middle):
                low = middle
            else:
                high = middle
        return low

    def _is_excluded(self, total: float, mean: float) -> bool:
        """Return whether `mean` can be ruled out as the true mean, because the observations are too large for it.

        The evidence against `mean` is the average of several supermartingales, one for each lambda. By Ville's
        inequality, this evidence ever reaches 2 / delta for the true mean with a probability of at most delta / 2.
        """
        log_evidence = LAMBDAS * (total - self.n * mean) - PSI * self.variation  # one value per lambda
        log_mean_evidence = float(np.logaddexp.reduce(log_evidence)) - math.log(len(LAMBDAS))
        return log_mean_evidence >= math.log(2 / self.delta)


@dataclass
class GuaranteeTest:
    """A sequential test whether a mean exceeds a guaranteed limit.

    The test bets play money on observations above the limit. Growing capital is evidence against the guarantee.

    Attributes:
        limit: The guarantee is that the mean is at most this limit.
        delta: Maximum probability of a false alarm.
        n: Number of observations.
        is_violated: Whether the guarantee was found to be violated. Once True, it stays True.
        capital: Current capital of each of several bets, which run at the same time.
        bets: How much of its capital each bet stakes. High stakes detect large violations soon, low stakes small ones.
    """

    limit: float
    delta: float = 0.05
    n: int = 0
    is_violated: bool = False
    capital: list[float] = field(init=False)
    bets: list[float] = field(init=False)

    def __post_init__(self) -> None:
        """Check the limit and delta, and choose the stake of each bet."""
        _check_delta(self.delta)
        if not 0 < self.limit < 1:
            raise BadSetting(f"limit={self.limit} is not allowed: it must be above 0 and below 1.")
        # Each bet is the best one (Kelly's) if the odds of the mean are `ratio` times the odds of the limit. The formula
        # follows from Kelly's bet (mean - limit) / (limit * (1 - limit)) and odds(mean) = ratio * limit / (1 - limit).
        self.bets = [(ratio - 1) / (1 - self.limit + ratio * self.limit) for ratio in ODDS_RATIOS]
        self.capital = [0.0] * len(ODDS_RATIOS)

    def add(self, value: float) -> None:
        """Add an observation between 0 and 1.

        The test bets that the mean is above the limit. Observations above the limit increase the capital of the bets,
        observations below the limit reduce it.
        """
        _check_value(value)
        # The initial capital is bet little by little. So a late violation is found although earlier bets lost.
        new_capital = _unspent_capital(self.n) - _unspent_capital(self.n + 1)
        for number, bet in enumerate(self.bets):
            growth = 1 + bet * (value - self.limit)
            self.capital[number] = (self.capital[number] + new_capital) * growth
        self.n += 1
        if self.evidence >= 1 / self.delta:
            self.is_violated = True

    @property
    def evidence(self) -> float:
        """Evidence against the guarantee: 1 at the start, and 1 / delta for a violation."""
        return sum(self.capital) / len(ODDS_RATIOS) + _unspent_capital(self.n)

    @property
    def evidence_share(self) -> float:
        """How near a violation is, from 0 (no evidence) to 1 (violated), on a log scale."""
        if self.is_violated:
            return 1.0
        return min(1.0, max(0.0, math.log(self.evidence) / math.log(1 / self.delta)))


class GuaranteeTests:
    """Copies of a `GuaranteeTest` that share observations, each with its own start and its own exceptions.

    They are computed together, because there may be many. Each copy has a number: 0, 1, 2 and so on.

    Attributes:
        are_violated: Whether each copy found the guarantee to be violated.
    """

    def __init__(self) -> None:
        self._n = np.empty(0)
        self._capital = np.empty((0, len(ODDS_RATIOS)))
        self.are_violated = np.empty(0, dtype=bool)

    def append(self, test: GuaranteeTest) -> None:
        """Add a copy of a test, as it is now."""
        self._n = np.append(self._n, test.n)
        self._capital = np.append(self._capital, [test.capital], axis=0)
        self.are_violated = np.append(self.are_violated, test.is_violated)

    def add(self, value: float, test: GuaranteeTest, exception: int) -> None:
        """Add an observation to all copies of a test but one, whose number is `exception`."""
        if self.are_violated.all():  # nothing can change any more
            return
        growth = 1 + np.array(test.bets) * (value - test.limit)
        unspent = 1 / (1 + np.log1p(self._n + 1))
        capital = (self._capital + (1 / (1 + np.log1p(self._n)) - unspent)[:, None]) * growth
        is_violated = capital.mean(axis=1) + unspent >= 1 / test.delta
        is_included = np.arange(len(self._n)) != exception
        self._n += is_included
        self._capital = np.where(is_included[:, None], capital, self._capital)
        self.are_violated |= is_included & is_violated


def _unspent_capital(n: int) -> float:
    """Return the share of the initial capital not yet bet after n observations."""
    return 1 / (1 + math.log1p(n))


def _check_value(value: float) -> None:
    """Raise BadInput if an observation is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise BadInput(f"the observation {value} is not between 0 and 1. Scale all observations to this range.")


def _check_delta(delta: float) -> None:
    """Raise BadSetting if the error probability delta is not between 0 and 1."""
    if not 0 < delta < 1:
        raise BadSetting(f"delta={delta} is not allowed: it must be above 0 and below 1, such as 0.05.")
