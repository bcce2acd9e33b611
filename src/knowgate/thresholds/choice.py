"""Thresholds without a proof: by a wanted retrieval rate, or by accuracy on the questions at hand.

Between two neighbouring needs every threshold does the same; the one half-way is taken, to six digits, so that it can
be typed and does not hang on the last bit of a score.
"""

from __future__ import annotations

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.gates import ALWAYS
from knowgate.thresholds.outcomes import Floats, Outcomes

DIGITS = 6


def candidates(needs: Floats) -> Floats:
    """From always retrieving to skipping everything, in rising order."""
    values = np.unique(needs)
    between = np.round((values[:-1] + values[1:]) / 2, DIGITS)
    return np.unique(np.concatenate([[ALWAYS], between, [1.0]]))


def for_rate(needs: Floats, rate: float) -> float:
    """The threshold whose retrieval rate on these questions is closest to `rate` without being above it."""
    if not 0 <= rate <= 1:
        raise BadSetting(f"the retrieval rate is {rate}; it must be between 0 and 1.")
    if not len(needs):
        raise BadInput("there are no questions to choose a threshold on.")
    thresholds = candidates(needs)
    retrieved = len(needs) - np.searchsorted(np.sort(needs), thresholds, side="right")
    return float(thresholds[np.argmax(retrieved <= rate * len(needs) + 1e-9)])  # rates only fall along the thresholds


def for_accuracy(outcomes: Outcomes) -> float:
    """The threshold with the most right answers on these questions; of several, the one that retrieves least."""
    if not len(outcomes):
        raise BadInput("there are no questions to choose a threshold on.")
    thresholds = candidates(outcomes.needs)
    order = np.argsort(outcomes.needs, kind="stable")
    gains = np.cumsum(outcomes.closed[order].astype(int) - outcomes.opened[order].astype(int))
    skipped = np.searchsorted(outcomes.needs[order], thresholds, side="right")
    right = np.concatenate([[0], gains])[skipped]  # against always retrieving
    return float(thresholds[np.flatnonzero(right == right.max())[-1]])
