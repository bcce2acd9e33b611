"""Numbers with their uncertainty: one bootstrap, one AUROC, ECE and Brier, shares with intervals, paired tests,
bounds that hold at every moment.

Knows arrays; nothing of gates, questions or files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.statistics.bootstrap import (
        RESAMPLES,
        Draws,
        Estimate,
        Measure,
        estimate,
        estimate_auroc,
        estimate_mean,
        estimate_means,
        estimate_quality,
        p_value,
    )
    from knowgate.statistics.logistic import SMALLEST, logit, sigmoid
    from knowgate.statistics.measures import (
        Bools,
        Floats,
        Ranked,
        Weights,
        accuracy,
        auroc,
        divided,
        ece_bins,
        once,
        weighted_brier,
        weighted_ece,
        weighted_mean,
    )
    from knowgate.statistics.paired import Comparison, holm, mcnemar
    from knowgate.statistics.sequences import MeanBounds, PromiseTest
    from knowgate.statistics.shares import Agreement, Correlation, Share, agreement, mean, pearson, share, wilson
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Agreement",
    "Bools",
    "Comparison",
    "Correlation",
    "Draws",
    "Estimate",
    "Floats",
    "MeanBounds",
    "Measure",
    "PromiseTest",
    "RESAMPLES",
    "Ranked",
    "SMALLEST",
    "Share",
    "Weights",
    "accuracy",
    "agreement",
    "auroc",
    "divided",
    "ece_bins",
    "estimate",
    "estimate_auroc",
    "estimate_mean",
    "estimate_means",
    "estimate_quality",
    "holm",
    "logit",
    "mcnemar",
    "mean",
    "once",
    "p_value",
    "pearson",
    "share",
    "sigmoid",
    "weighted_brier",
    "weighted_ece",
    "weighted_mean",
    "wilson",
]
