"""The logistic function and its inverse, for one number or an array of them."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

PROBABILITY_FLOOR = 1e-6  # probabilities are kept this far from 0 and 1, so that their logits are finite


@overload
def sigmoid(z: float) -> float: ...
@overload
def sigmoid(z: NDArray[Any]) -> NDArray[Any]: ...
def sigmoid(z: float | NDArray[Any]) -> float | NDArray[Any]:
    """1 / (1 + e^-z): exactly 0 and 1 far out, never an overflow."""
    with np.errstate(over="ignore"):  # e^-z is then infinite, and its inverse the 0 that is meant
        p = 1 / (1 + np.exp(-np.asarray(z)))
    return float(p) if p.ndim == 0 else p


@overload
def logit(p: float, floor: float = PROBABILITY_FLOOR) -> float: ...
@overload
def logit(p: NDArray[Any], floor: float = PROBABILITY_FLOOR) -> NDArray[Any]: ...
def logit(p: float | NDArray[Any], floor: float = PROBABILITY_FLOOR) -> float | NDArray[Any]:
    """log(p / (1 - p)), with p kept away from 0 and 1."""
    kept = np.clip(p, floor, 1 - floor)
    z = np.log(kept / (1 - kept))
    return float(z) if z.ndim == 0 else z
