"""Thresholds: by guarantee, by budget or by accuracy, each with the evidence for it. Runs no LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.thresholds.calibrate_gate import calibrate
    from knowgate.thresholds.calibration import Calibration, Target, store, usable
    from knowgate.thresholds.choice import NEVER, candidates, for_accuracy, for_loss
    from knowgate.thresholds.evidence import CALIBRATED, sentence
    from knowgate.thresholds.guarantee import rows_needed
    from knowgate.thresholds.outcomes import Outcomes, ThresholdResult, try_threshold
    from knowgate.thresholds.promises import Deployment, is_proven_alone, objections, promise, proven_loss
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "CALIBRATED",
    "Calibration",
    "Deployment",
    "NEVER",
    "Outcomes",
    "Target",
    "ThresholdResult",
    "calibrate",
    "candidates",
    "for_accuracy",
    "for_loss",
    "is_proven_alone",
    "objections",
    "promise",
    "proven_loss",
    "rows_needed",
    "sentence",
    "store",
    "try_threshold",
    "usable",
]
