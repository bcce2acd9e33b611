"""Small classifiers applied in numpy: standardise, then an ensemble of ReLU networks (linear: no hidden layer).

Tensor names: mean, scale; then per member `{member}.{layer}.weight` (out x in) and `.bias`. The last layer has two
outputs (known, needed) or one (a logit of needed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import ArtifactError, BadInput
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.logistic import PROBABILITY_FLOOR, logit, sigmoid
from knowgate.types import Vector

MAX_WEIGHT = 1e30  # a weight beyond overflows when it is used
MIN_DIVISOR = 1e-12  # what is divided by must be larger
Shape = tuple[int | None, ...]


class TensorValidator:
    """Tensors of an artifact that wait to be claimed."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]):
        self._waiting = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def claim(self, name: str, *sizes: int | None, positive: bool = False) -> NDArray[Any]:
        """The tensor of this name, if it has these sizes (None: any from 1 on) and holds usable numbers."""
        if name not in self._waiting:
            raise BadInput(f"the tensor '{name}' is missing.")
        tensor = self._waiting.pop(name)
        if not _fits(tensor.shape, sizes):
            raise BadInput(f"the tensor '{name}' has the shape {_shown(tensor.shape)}, not {_shown(sizes)}.")
        if not np.issubdtype(tensor.dtype, np.floating):
            raise BadInput(f"the tensor '{name}' holds {tensor.dtype}, not floating-point numbers.")
        if float(np.abs(tensor).max()) > MAX_WEIGHT or (positive and float(tensor.min()) < MIN_DIVISOR):
            raise BadInput(f"the tensor '{name}' holds numbers out of range.")
        return tensor

    def finish(self) -> None:
        """Refuse tensors that are not this gate's."""
        if self._waiting:
            raise BadInput(f"the tensor '{min(self._waiting)[:80]}' is not one of this gate's.")


def _fits(shape: tuple[int, ...], sizes: Shape) -> bool:
    if len(shape) != len(sizes):
        return False
    return all(found >= 1 and wanted in (None, found) for found, wanted in zip(shape, sizes, strict=True))


def _shown(sizes: Shape) -> str:
    return " x ".join("any" if size is None else str(size) for size in sizes) or "of a single number"


def check_feature_width(features: Vector, width: int) -> None:
    """Refuse features of another width than the weights: a gate of another LLM or embedding."""
    if features.shape[1] != width:
        raise ArtifactError(
            f"the gate was fitted on features of {width} numbers and is given {features.shape[1]}: they come from "
            "another LLM or embedding. Use it with its own, or fit it on this one."
        )


Floats = NDArray[np.float64]


def apply_calibration(raw: Floats, calibration: Mapping[str, Any]) -> Floats:
    """Apply a calibration of a manifest: platt (a, b on the logit; floor: how near to 0 and 1 scores are told apart),
    isotonic (x, y knots, linear between) of gates that were fitted before, or none."""
    kind, needs = calibration["kind"], np.clip(raw, 0.0, 1.0)
    if kind == "isotonic":
        needs = np.interp(raw, calibration["x"], calibration["y"])
    elif kind == "platt":
        z = calibration["a"] * logit(raw, calibration.get("floor", PROBABILITY_FLOOR)) + calibration["b"]
        needs = sigmoid(z)
    return needs.astype(np.float64)


def claim_network(tensors: TensorValidator, prefix: str = "", width: int | None = None) -> None:
    """Claim the tensors of one network; width: how many features it reads, None where only the LLM knows."""
    (width,) = tensors.claim(f"{prefix}mean", width).shape
    tensors.claim(f"{prefix}scale", width, positive=True)
    member = 0
    while member == 0 or f"{prefix}{member}.0.weight" in tensors:
        _expect_member(tensors, f"{prefix}{member}.", width)
        member += 1


def _expect_member(tensors: TensorValidator, prefix: str, width: int) -> None:
    layer = 0
    while layer == 0 or f"{prefix}{layer}.weight" in tensors:
        (width, _) = tensors.claim(f"{prefix}{layer}.weight", None, width).shape
        tensors.claim(f"{prefix}{layer}.bias", width)
        layer += 1
    if width not in (1, 2):
        raise BadInput(f"the network '{prefix}{layer - 1}' ends in {width} numbers, not in one or two.")


def apply_network(tensors: Tensors, features: Vector, prefix: str = "") -> Floats:
    """Probability that retrieval is needed, averaged over the members."""
    check_feature_width(features, len(tensors[f"{prefix}mean"]))
    x = (features.astype(np.float64) - tensors[f"{prefix}mean"]) / tensors[f"{prefix}scale"]
    heads = sorted({name.split(".")[0] for name in _members(tensors, prefix)})
    mean: Floats = np.mean([_member(tensors, f"{prefix}{head}.", x) for head in heads], axis=0)
    return mean


def compute_contributions(tensors: Tensors, features: Vector, prefix: str = "") -> Floats | None:
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
