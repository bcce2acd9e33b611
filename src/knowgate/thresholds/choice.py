"""The one chooser of thresholds without a proof: by a wanted retrieval rate, by accuracy on the questions at hand, or
by a loss there that is not to be exceeded.

Whoever chooses a threshold chooses it here: `calibrate`, the tuned column of an evaluation, a fit. The rule:

- A question is retrieved for where its need is above the threshold, so between two neighbouring needs every threshold
  does the same. The one half-way is taken, to six digits: it can be typed and does not hang on a score's last bit.
  Needs that six digits do not tell apart get as many digits as it takes.
- ALWAYS (-1) lies below every need and retrieves for each question; 1 retrieves for none.
- Of equally good thresholds the one that retrieves least is taken. Where retrieving gains nothing on these questions,
  that is 1: never.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.gates import ALWAYS
from knowgate.statistics import Floats
from knowgate.thresholds.outcomes import Outcomes

DIGITS = 6
NEVER = 1.0  # no need is above it


def candidates(needs: Floats) -> Floats:
    """From always retrieving to skipping everything, in rising order."""
    values = np.unique(needs)
    return np.unique(np.concatenate([[ALWAYS], _between(values[:-1], values[1:]), [NEVER]]))


def _between(low: Floats, high: Floats) -> Floats:
    """Half-way, rounded where that still skips the lower need and retrieves for the higher one."""
    middle = (low + high) / 2
    rounded = np.round(middle, DIGITS)
    return np.select(
        [(low <= rounded) & (rounded < high), middle < high],
        [rounded, middle],
        default=low,  # two numbers with none between them
    )


def for_rate(needs: Floats, rate: float) -> float:
    """The threshold whose retrieval rate on these questions is closest to `rate` without being above it."""
    if not 0 <= rate <= 1:
        raise BadSetting(f"the retrieval rate is {rate}; it must be between 0 and 1.")
    if not len(needs):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = candidates(needs)
    retrieved = len(needs) - np.searchsorted(np.sort(needs), thresholds, side="right")
    return float(thresholds[np.argmax(retrieved <= rate * len(needs) + 1e-9)])  # rates only fall along the thresholds


def for_accuracy(outcomes: Outcomes) -> float:
    """The threshold with the most right answers on these questions; of several, the one that retrieves least."""
    if not len(outcomes):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = candidates(outcomes.needs)
    right = _right(outcomes, thresholds)
    return float(thresholds[np.flatnonzero(right == right.max())[-1]])


def for_loss(outcomes: Outcomes, most: float) -> float:
    """The threshold that retrieves least among those up to the first that loses more than `most` accuracy here.

    Not further, where a later one happens to lose less again: the more thresholds are tried, the more of them look good
    by luck.
    """
    if not len(outcomes):
        raise BadInput("there are no questions to choose a threshold on. Label some: knowgate label")
    thresholds = candidates(outcomes.needs)
    lost = (outcomes.open_right.sum() - _right(outcomes, thresholds)) / len(outcomes)
    beyond = np.flatnonzero(lost > most + 1e-9)
    return float(thresholds[max(0, beyond[0] - 1) if len(beyond) else -1])


def _right(outcomes: Outcomes, thresholds: Floats) -> Any:
    """Right answers under each threshold."""
    order = np.argsort(outcomes.needs, kind="stable")
    gains = np.cumsum(outcomes.closed_right[order].astype(int) - outcomes.after[order].astype(int))
    skipped = np.searchsorted(outcomes.needs[order], thresholds, side="right")
    return outcomes.after.sum() + np.concatenate([[0], gains])[skipped]
