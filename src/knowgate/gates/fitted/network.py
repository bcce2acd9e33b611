"""Small classifiers applied in numpy: standardise, then an ensemble of ReLU networks (linear: no hidden layer).

Tensor names: mean, scale; then per member `{member}.{layer}.weight` (out x in) and `.bias`. The last layer has two
outputs (known, needed) or one (a logit of needed).
"""

from __future__ import annotations

import numpy as np

from knowgate.errors import BadInput
from knowgate.gates.fitted.artefact import Tensors
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors, check_width
from knowgate.statistics import sigmoid
from knowgate.types import Vector


def expect_network(tensors: ExpectedTensors, prefix: str = "", width: int | None = None) -> None:
    """Claim the tensors of one network; width: how many features it reads, None where only the LLM knows."""
    (width,) = tensors.claim(f"{prefix}mean", width).shape
    tensors.claim(f"{prefix}scale", width, positive=True)
    member = 0
    while member == 0 or f"{prefix}{member}.0.weight" in tensors:
        _expect_member(tensors, f"{prefix}{member}.", width)
        member += 1


def _expect_member(tensors: ExpectedTensors, prefix: str, width: int) -> None:
    layer = 0
    while layer == 0 or f"{prefix}{layer}.weight" in tensors:
        (width, _) = tensors.claim(f"{prefix}{layer}.weight", None, width).shape
        tensors.claim(f"{prefix}{layer}.bias", width)
        layer += 1
    if width not in (1, 2):
        raise BadInput(f"the network '{prefix}{layer - 1}' ends in {width} numbers, not in one or two.")


def apply_network(tensors: Tensors, features: Vector, prefix: str = "") -> Floats:
    """Probability that retrieval is needed, averaged over the members."""
    check_width(features, len(tensors[f"{prefix}mean"]))
    x = (features.astype(np.float64) - tensors[f"{prefix}mean"]) / tensors[f"{prefix}scale"]
    heads = sorted({name.split(".")[0] for name in _members(tensors, prefix)})
    mean: Floats = np.mean([_member(tensors, f"{prefix}{head}.", x) for head in heads], axis=0)
    return mean


def linear_parts(tensors: Tensors, features: Vector, prefix: str = "") -> Floats | None:
    """What each feature adds to the logit of needing, averaged over the members; None where they are not linear."""
    heads = sorted({name.split(".")[0] for name in _members(tensors, prefix)})
    if any(f"{prefix}{head}.1.weight" in tensors for head in heads):
        return None
    weights = [tensors[f"{prefix}{head}.0.weight"].astype(np.float64) for head in heads]
    slopes = np.mean([rows[-1] - rows[0] if len(rows) == 2 else rows[0] for rows in weights], axis=0)
    parts: Floats = slopes * (features.astype(np.float64) - tensors[f"{prefix}mean"]) / tensors[f"{prefix}scale"]
    return parts


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
