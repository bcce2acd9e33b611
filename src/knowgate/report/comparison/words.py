"""Numbers of a verdict as people say them."""

from __future__ import annotations

from knowgate.display import NOTHING, points
from knowgate.evaluation import Recommendation
from knowgate.statistics import Estimate


def threshold_words(threshold: float | None) -> str:
    return NOTHING if threshold is None else f"{threshold:.3g}"


def interval_words(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {points(found.low)} to {points(found.high)})"


def points_plain(share: float) -> str:
    return f"{100 * share:g} points" if share != 0.01 else "1 point"


def chance_words(advice: Recommendation) -> str:
    """What the gate gains over chance."""
    gain = f"{points(advice.gain.value or 0.0)} points{interval_words(advice.gain)}"
    return f"against as many skips at random it gains {gain}"
