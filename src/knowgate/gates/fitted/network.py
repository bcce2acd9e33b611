"""Small classifiers applied in numpy: standardise, then an ensemble of ReLU networks (linear: no hidden layer).

Tensor names: mean, scale; then per member `{member}.{layer}.weight` (out x in) and `.bias`. The last layer has two
outputs (known, needed) or one (a logit of needed).
"""

from __future__ import annotations

import numpy as np

from knowgate.gates.fitted.artefact import Tensors
from knowgate.gates.fitted.probability import Floats
from knowgate.statistics import sigmoid
from knowgate.types import Vector


def apply_network(tensors: Tensors, features: Vector, prefix: str = "") -> Floats:
    """Probability that retrieval is needed, averaged over the members."""
    x = (features.astype(np.float64) - tensors[f"{prefix}mean"]) / tensors[f"{prefix}scale"]
    heads = sorted({name.split(".")[0] for name in _members(tensors, prefix)})
    mean: Floats = np.mean([_member(tensors, f"{prefix}{head}.", x) for head in heads], axis=0)
    return mean


def _members(tensors: Tensors, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix) and name.endswith(".weight")]


def _member(tensors: Tensors, prefix: str, x: Floats) -> Floats:
    depth = sum(name.startswith(prefix) and name.endswith(".weight") for name in tensors)
    for layer in range(depth):
        x = x @ tensors[f"{prefix}{layer}.weight"].T.astype(np.float64) + tensors[f"{prefix}{layer}.bias"]
        if layer < depth - 1:
            x = np.maximum(x, 0.0)
    margin = x[:, -1] - x[:, 0] if x.shape[1] == 2 else x[:, 0]
    need: Floats = sigmoid(margin)
    return need
