"""How surprising so small a net loss would be if the true one were epsilon: an exact test of a three-valued mean.

The net loss of a question is 1 where always retrieving is right and the cascade wrong, -1 where it is the other way
round, else 0. Its mean is accuracy lost, answers gained counted. Of n questions `lost` have 1 and `gained` -1. If the
mean is epsilon and a share q of questions is one or the other, lost - gained has a known distribution: the number of
such questions is binomial, and so are the lost ones among them. q is not known: the p-value is the largest over all q
up to an upper confidence limit, plus the probability that q lies above it (Berger, Boos 1994, "P values maximized over
a confidence set for the nuisance parameter").

Tests of bounded means hold for any loss and need more rows: with 1,500 questions of which 6 % are lost and 6 % gained,
Hoeffding-Bentkus shows a loss of at most .055, betting (Waudby-Smith and Ramdas 2024) of .028, this one of .017.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from knowgate.errors import MissingExtra
from knowgate.statistics import Floats

SHARE_OF_DELTA = 0.02  # of the error that is spent on q lying above its limit
STEPS = 7  # values of q that are tried; the p-value rises smoothly with q


@functools.lru_cache(maxsize=1 << 16)
def net_p_value(lost: int, gained: int, n: int, epsilon: float, delta: float) -> float:
    """P(lost - gained as small as this or smaller), if the mean were epsilon, whatever the share of discordant ones."""
    spent = SHARE_OF_DELTA * delta
    shares = np.linspace(epsilon, max(_upper_limit(lost + gained, n, spent), epsilon), STEPS)[:, None]
    m = _likely(n, float(shares[0, 0]), float(shares[-1, 0]))
    at_most = _binomial_cdf(np.floor((m + lost - gained) / 2), m, np.minimum(1.0, (shares + epsilon) / (2 * shares)))
    found: Floats = (_binomial_pmf(m, n, shares) * at_most).sum(axis=1)
    return min(1.0, float(found.max()) + spent)


def _likely(n: int, low: float, high: float) -> Floats:
    """Numbers of discordant questions among n, up to some of a probability below 1e-14."""
    first = n * low - 8 * math.sqrt(n * low) - 1
    last = n * high + 8 * math.sqrt(n * high) + 20
    return np.arange(max(0, math.floor(first)), min(n, math.ceil(last)) + 1, dtype=np.float64)


def _upper_limit(hits: int, n: int, error: float) -> float:
    """Clopper and Pearson's one-sided limit of a share."""
    return 1.0 if hits >= n else float(_special().betaincinv(hits + 1, n - hits, 1 - error))


def _binomial_pmf(k: Floats, n: int, p: Floats) -> Floats:
    special = _special()
    ways = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    found: Floats = np.exp(ways + special.xlogy(k, p) + special.xlog1py(n - k, -p))
    return found


def _binomial_cdf(k: Floats, n: Floats, p: Floats) -> Floats:
    """P(at most k hits of n); below 0 none, from n on certain."""
    inside = (k >= 0) & (k < n)
    found: Floats = _special().betainc(np.where(inside, n - k, 1.0), np.where(inside, k + 1, 1.0), 1 - p)
    return np.where(inside, found, (k >= n).astype(float))


def net_rows_needed(epsilon: float, delta: float) -> int:
    """The fewest questions that can prove anything with nothing lost and nothing gained."""
    n = 1
    while net_p_value(0, 0, n, epsilon, delta) > delta:
        n *= 2
    low, high = n // 2, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if net_p_value(0, 0, middle, epsilon, delta) <= delta else (middle, high)
    return high


@functools.cache
def _special() -> Any:
    try:
        from scipy import special
    except ModuleNotFoundError as error:
        raise MissingExtra("a guarantee", "train") from error
    return special
