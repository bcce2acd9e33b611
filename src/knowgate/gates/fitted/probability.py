"""From a gate's raw score to a probability: monotone maps fitted on a split of their own. Applied in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.statistics import logit, sigmoid

Floats = NDArray[np.float64]


def to_probability(raw: Floats, calibration: Mapping[str, Any]) -> Floats:
    """Apply a calibration of a manifest: isotonic (x, y knots, linear between), platt (a, b on the logit), or none."""
    kind, needs = calibration["kind"], np.clip(raw, 0.0, 1.0)
    if kind == "isotonic":
        needs = np.interp(raw, calibration["x"], calibration["y"])
    elif kind == "platt":
        z = calibration["a"] * logit(raw) + calibration["b"]
        needs = sigmoid(z)
    return needs.astype(np.float64)
