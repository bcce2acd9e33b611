"""The logistic function and its inverse, for numbers and arrays."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

PROBABILITY_FLOOR = 1e-6  # probabilities are clipped this far from 0 and 1, so that their logits are finite


@overload
def sigmoid(z: float) -> float: ...
@overload
def sigmoid(z: NDArray[Any]) -> NDArray[Any]: ...
def sigmoid(z: float | NDArray[Any]) -> float | NDArray[Any]:
    """Return the logistic function 1 / (1 + e^-z) of a number or an array, without overflow warnings."""
    with np.errstate(over="ignore"):  # e^-z overflows to infinity, which gives the correct limit 0
        p = 1 / (1 + np.exp(-np.asarray(z)))
    return float(p) if p.ndim == 0 else p


@overload
def logit(p: float, floor: float = PROBABILITY_FLOOR) -> float: ...
@overload
def logit(p: NDArray[Any], floor: float = PROBABILITY_FLOOR) -> NDArray[Any]: ...
def logit(p: float | NDArray[Any], floor: float = PROBABILITY_FLOOR) -> float | NDArray[Any]:
    """Return the inverse of `sigmoid`, log(p / (1 - p)), with p clipped to [floor, 1 - floor]."""
    clipped = np.clip(p, floor, 1 - floor)
    z = np.log(clipped / (1 - clipped))
    return float(z) if z.ndim == 0 else z
