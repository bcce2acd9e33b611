"""From a gate's raw score to a probability: monotone maps fitted on a split of their own. Applied in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.statistics import SMALLEST, logit, sigmoid

Floats = NDArray[np.float64]


def to_probability(raw: Floats, calibration: Mapping[str, Any]) -> Floats:
    """Apply a calibration of a manifest: platt (a, b on the logit; floor: how near to 0 and 1 scores are told apart),
    isotonic (x, y knots, linear between) of gates that were fitted before, or none."""
    kind, needs = calibration["kind"], np.clip(raw, 0.0, 1.0)
    if kind == "isotonic":
        needs = np.interp(raw, calibration["x"], calibration["y"])
    elif kind == "platt":
        z = calibration["a"] * logit(raw, calibration.get("floor", SMALLEST)) + calibration["b"]
        needs = sigmoid(z)
    return needs.astype(np.float64)
