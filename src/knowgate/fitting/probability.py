"""Fitting the map from raw score to probability, on a split that nothing else has seen."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from knowgate.statistics import Bools, Floats, logit

Kind = Literal["isotonic", "platt"]
ISOTONIC_OF_A_KIND = 200  # rows; below, isotonic regression gives steps of 0 and 1 and Platt's two parameters are safer


def fit_calibration(
    raw: Floats, needed: Bools, kind: Kind | None = None, weights: Floats | None = None
) -> dict[str, Any]:
    """A calibration for a manifest. Isotonic with enough rows, else Platt; none of it if only one kind is there.

    weights: how much each row counts; None for all the same.
    """
    if not 0 < needed.sum() < len(needed):
        return {"kind": "none"}
    rarer = min(int(needed.sum()), int((~needed).sum()))
    chosen = kind or ("isotonic" if rarer >= ISOTONIC_OF_A_KIND else "platt")
    return (_isotonic if chosen == "isotonic" else _platt)(raw, needed, weights)


def _isotonic(raw: Floats, needed: Bools, weights: Floats | None) -> dict[str, Any]:
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(raw, needed.astype(float), weights)
    x = [float(v) for v in fitted.X_thresholds_]
    y = [float(v) for v in fitted.y_thresholds_]
    return {"kind": "isotonic", "x": x, "y": y}


def _platt(raw: Floats, needed: Bools, weights: Floats | None) -> dict[str, Any]:
    fitted = LogisticRegression(C=1e3).fit(logit(raw)[:, None], needed, sample_weight=weights)
    slope = max(float(fitted.coef_[0][0]), 1e-3)  # a calibration may not turn the order round
    if slope == 1e-3:
        rate = float(np.clip(np.average(needed, weights=weights), 1e-3, 1 - 1e-3))
        return {"kind": "platt", "a": slope, "b": logit(rate)}
    return {"kind": "platt", "a": slope, "b": float(fitted.intercept_[0])}
