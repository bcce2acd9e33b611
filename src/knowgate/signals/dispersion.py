"""SeaKR's uncertainty: how far apart the states are in which a model's sampled answers end.

Knows states as numbers; not where they come from or what is decided on them.
"""

from __future__ import annotations

import numpy as np

from knowgate.errors import ModelError
from knowgate.types import Vector

SEAKR = "seakr"  # its name on record
SAMPLES = 20  # SeaKR's released settings, as is alpha
ALPHA = 1e-3  # also that of INSIDE (Chen et al. 2024), whose score SeaKR takes over


def log_determinant(states: Vector, alpha: float = ALPHA) -> float:
    """(1 / n) log det(Z J Z^T + alpha I) of n states Z (n x d), where J takes each state's own mean off it.

    Never below log(alpha). Equal answers give one eigenvalue of some size and n - 1 of alpha.
    """
    if states.ndim != 2 or not len(states) or not np.isfinite(states).all():
        raise ModelError(f"the states of the samples are no array of numbers (samples x width): {states.shape}.")
    centred = states.astype(np.float64) - states.astype(np.float64).mean(axis=1, keepdims=True)
    eigenvalues = np.linalg.eigvalsh(centred @ centred.T)
    return float(np.log(np.maximum(eigenvalues, 0.0) + alpha).mean())
