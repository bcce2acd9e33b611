"""Thresholds: by guarantee, by budget or by accuracy, each with the evidence for it. Runs no LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.thresholds.calibrate_gate import calibrate
    from knowgate.thresholds.calibration import Calibration, Target, store, usable
    from knowgate.thresholds.evidence import sentence
    from knowgate.thresholds.outcomes import ThresholdResult
    from knowgate.thresholds.promises import Deployment, promise
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Calibration",
    "Deployment",
    "Target",
    "ThresholdResult",
    "calibrate",
    "promise",
    "sentence",
    "store",
    "usable",
]
