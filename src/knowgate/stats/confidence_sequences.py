"""Bounds and tests that hold at every moment at once, so that one may look after each question and stop when one likes.

For numbers between 0 and 1 that come one after the other; nothing is assumed of them but that. Two tools:

`MeanBounds`: a confidence sequence for the mean so far. For each lambda in [0, 1) the process
exp(lambda * sum(x - mean) - psi(lambda) * sum((x - guess)^2)), psi(lambda) = -log(1 - lambda) - lambda, where each
guess was made before its x, is a supermartingale that begins at 1; so is a mixture over lambdas. By Ville's inequality
it ever reaches 2 / delta with probability delta / 2 at most. Both sides together miss the mean so far at some moment
with probability delta at most, also where the mean changes on the way.

`PromiseTest`: evidence that the mean is above what was promised. A gambler bets on it: capital times
1 + bet * (x - promised), which cannot grow in the long run while the promise is kept. New money is bet at each moment
(1 / (1 + log(1 + t)) of all is left after the t-th), for a promise that was kept for weeks and is broken from today
would else have to win back what was lost in those weeks. The capital is a supermartingale that begins at 1: it ever
reaches 1 / delta with probability delta at most, while the promise is kept.

References: Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences",
theorem 4; Waudby-Smith, Ramdas 2024, "Estimating means of bounded random variables by betting"; Shin, Ramdas, Rinaldo
2023, "E-detectors" (new money at each moment).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.stats.metrics import FloatArray

# Large ones for means near the edges, small ones for many numbers; each doubling of how many costs log 2.
LAMBDAS: FloatArray = np.array([0.9, 0.6, 0.35, 0.2, 0.1, 0.05, 0.02])
PSI: FloatArray = -np.log1p(-LAMBDAS) - LAMBDAS
BISECTION_STEPS = 40  # of an interval of length 1, when a bound is searched for
N_ALTERNATIVES = 6  # means above the promise, evenly spaced on a log scale up to 1, on each of which is bet


@dataclass
class MeanConfidenceSequence:
    """The mean of what came so far, between bounds that hold at every moment with probability 1 - delta."""

    delta: float = 0.05
    n: int = 0
    total: float = 0.0
    spread: float = 0.0  # sum of squared distances from the guesses

    def __post_init__(self) -> None:
        _check_delta(self.delta)

    def add(self, value: float) -> None:
        _check_value(value)
        guess = (0.5 + self.total) / (1 + self.n)
        self.spread += (value - guess) ** 2
        self.total += value
        self.n += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None

    @property
    def low(self) -> float:
        return self._least(self.total)

    @property
    def high(self) -> float:
        """The least mean of the other way round."""
        return 1.0 - self._least(self.n - self.total)

    def _least(self, total: float) -> float:
        """The largest mean that is ruled out from below; 0 where none is."""
        low, high = 0.0, total / self.n if self.n else 0.0
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._rules_out(total, middle) else (low, middle)
        return low

    def _rules_out(self, total: float, mean: float) -> bool:
        logs = LAMBDAS * (total - self.n * mean) - PSI * self.spread
        return _log_mean(logs) >= math.log(2 / self.delta)


@dataclass
class GuaranteeTest:
    """Evidence that the mean is above `promised`; `is_broken` is wrong with probability delta at most, ever.

    Once broken it stays so, whatever comes: begin a new test after mending.
    """

    promised: float
    delta: float = 0.05
    n: int = 0
    is_broken: bool = False
    capital: list[float] = field(init=False)
    bets: list[float] = field(init=False)

    def __post_init__(self) -> None:
        _check_delta(self.delta)
        if not 0 < self.promised < 1:
            raise BadSetting(f"the promised loss is {self.promised}; it must be above 0 and below 1.")
        above = [self.promised ** (1 - place / (N_ALTERNATIVES + 1)) for place in range(1, N_ALTERNATIVES + 1)]
        scale = self.promised * (1 - self.promised)
        self.bets = [(mean - self.promised) / scale for mean in above]  # Kelly's, if that were the mean
        self.capital = [0.0] * N_ALTERNATIVES

    def add(self, value: float) -> None:
        _check_value(value)
        fresh = _unspent(self.n) - _unspent(self.n + 1)
        grown = [1 + bet * (value - self.promised) for bet in self.bets]
        self.capital = [(there + fresh) * factor for there, factor in zip(self.capital, grown, strict=True)]
        self.n += 1
        self.is_broken = self.is_broken or self.evidence >= 1 / self.delta

    @property
    def evidence(self) -> float:
        """The gambler's capital, what is not yet bet included; 1 at the beginning."""
        return sum(self.capital) / N_ALTERNATIVES + _unspent(self.n)

    @property
    def closeness(self) -> float:
        """How far the evidence has come, on a log scale: 0 for none, 1 for broken."""
        if self.is_broken:
            return 1.0
        return min(1.0, max(0.0, math.log(self.evidence) / math.log(1 / self.delta)))


def _unspent(n: int) -> float:
    """What is left of the first money after so many moments; it never ends, and there is enough at all times."""
    return 1 / (1 + math.log1p(n))


def _log_mean(logs: FloatArray) -> float:
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).mean()))


def _check_value(value: float) -> None:
    if not 0 <= value <= 1:
        raise BadInput(f"{value} is not between 0 and 1, so that nothing can be said of its mean.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise BadSetting(f"delta is {delta}; it must be above 0 and below 1 (0.05 for 95 % confidence).")
