"""How good a need is: ranking, calibration, with bootstrap intervals. What scikit-learn has is scikit-learn's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
BINS = 15
RESAMPLES = 500


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % bootstrap interval; value is None where it is not defined (one kind only)."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def shown(self) -> str:
        if self.value is None:
            return "not defined"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def auroc(needed: Bools, needs: Floats) -> float | None:
    return float(roc_auc_score(needed, needs)) if 0 < needed.sum() < len(needed) else None


def auprc(needed: Bools, needs: Floats) -> float | None:
    return float(average_precision_score(needed, needs)) if needed.any() else None


def accuracy(needed: Bools, needs: Floats) -> float | None:
    """Of the decision at 0.5."""
    return float(((needs > 0.5) == needed).mean()) if len(needed) else None


def brier(needed: Bools, needs: Floats) -> float | None:
    return float(brier_score_loss(needed, needs, pos_label=True)) if len(needed) else None


def ece(needed: Bools, needs: Floats) -> float | None:
    """Expected calibration error over bins of equal width."""
    if not len(needed):
        return None
    bins = np.minimum((needs * BINS).astype(int), BINS - 1)
    gaps = [abs(needed[bins == b].mean() - needs[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return float(sum(gaps))


MEASURES: dict[str, Callable[[Bools, Floats], float | None]] = {
    "auroc": auroc,
    "auprc": auprc,
    "accuracy": accuracy,
    "ece": ece,
    "brier": brier,
}


def measure(needed: Bools, needs: Floats, seed: int = 0) -> dict[str, Measured]:
    """Every measure with its interval."""
    rng = np.random.default_rng(seed)
    picks = [rng.integers(0, len(needed), len(needed)) for _ in range(RESAMPLES)] if len(needed) else []
    return {name: _with_interval(function, needed, needs, picks) for name, function in MEASURES.items()}


def _with_interval(
    function: Callable[[Bools, Floats], float | None], needed: Bools, needs: Floats, picks: list[NDArray[np.int64]]
) -> Measured:
    value = function(needed, needs)
    drawn = [function(needed[pick], needs[pick]) for pick in picks]
    values = [found for found in drawn if found is not None]
    if value is None or not values:
        return Measured(None)
    return Measured(value, *(float(edge) for edge in np.quantile(values, [0.025, 0.975])))
