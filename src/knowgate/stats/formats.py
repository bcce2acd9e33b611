"""Text of estimates with their confidence intervals, for tables."""

from __future__ import annotations

from knowgate.core.display import MISSING_VALUE, format_percent, format_points
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import Proportion


def format_proportion(proportion: Proportion, missing: str = MISSING_VALUE) -> str:
    """Format a proportion with its interval as '52.0 % [48.1, 55.9], n = 600', or `missing` if n is 0."""
    value, low, high = proportion.value, proportion.low, proportion.high
    if value is None or low is None or high is None:
        return missing
    return f"{format_percent(value)} [{100 * low:.1f}, {100 * high:.1f}], n = {proportion.n}"


def format_percent_estimate(estimate: Estimate) -> str:
    """Format a share with its interval as '52.0 % [48.1, 55.9]', or a dash if it is not defined."""
    if estimate.value is None:
        return MISSING_VALUE
    if estimate.low is None or estimate.high is None:
        return format_percent(estimate.value)
    return f"{format_percent(estimate.value)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def format_points_estimate(estimate: Estimate) -> str:
    """Format a difference of two shares with its interval, in percentage points, as '+1.2 [-0.3, +2.7]'."""
    if estimate.value is None:
        return MISSING_VALUE
    if estimate.low is None or estimate.high is None:
        return format_points(estimate.value)
    return f"{format_points(estimate.value)} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def format_p_value(p_value: float) -> str:
    """Format a p-value with three decimals, or as '< 0.001' if it is smaller."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
