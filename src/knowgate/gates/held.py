"""A plain gate at a threshold that was chosen for it. A fitted one keeps its own in its folder."""

from __future__ import annotations

import copy

from knowgate.types import Gate


def at_threshold(gate: Gate, threshold: float, name: str) -> Gate:
    """A copy that tables call `name`; the gate given stays as it is."""
    held = copy.copy(gate)
    object.__setattr__(held, "threshold", threshold)  # gates are frozen; both may be plain attributes of one
    object.__setattr__(held, "name", name)
    return held
