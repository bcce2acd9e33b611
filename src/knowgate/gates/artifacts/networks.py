"""Small classifiers in numpy: features are standardized, and the predictions of an ensemble of ReLU networks averaged.

Tensor names: `mean` and `scale`, then `{member}.{layer}.weight` (outputs x inputs) and `{member}.{layer}.bias`. The
last layer has two outputs (known, retrieval needed) or one (the logit of retrieval needed). A linear classifier has
one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import ArtifactError, BadInput
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.stats.metrics import PROBABILITY_FLOOR, FloatArray, logit, sigmoid
from knowgate.types import Vector

MAX_WEIGHT = 1e30  # larger weights overflow
MIN_DIVISOR = 1e-12  # smaller scales would overflow when features are divided by them
Shape = tuple[int | None, ...]


class TensorValidator:
    """Checks that a fitted gate or arbiter has exactly the expected tensors.

    Call `require` for each tensor, then `reject_unknown`.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]]):
        self._remaining = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._remaining

    def require(self, name: str, *shape: int | None, positive: bool = False) -> NDArray[Any]:
        """Check that an expected tensor is present and valid, and return it.

        Args:
            name: Name of the tensor.
            shape: Expected size of each dimension; None accepts any size of at least 1.
            positive: Reject values that are zero or negative.

        Raises:
            BadInput: The tensor is missing, or its shape, type or values are wrong.
        """
        if name not in self._remaining:
            raise BadInput(f"the tensor '{name}' is missing from the weights.")
        tensor = self._remaining.pop(name)
        if not _has_shape(tensor, shape):
            raise BadInput(
                f"the tensor '{name}' has the shape {_format_shape(tensor.shape)}, not {_format_shape(shape)}."
            )
        if not np.issubdtype(tensor.dtype, np.floating):
            raise BadInput(f"the tensor '{name}' holds {tensor.dtype}, not floating-point numbers.")
        is_too_large = float(np.abs(tensor).max()) > MAX_WEIGHT
        is_too_small = positive and float(tensor.min()) < MIN_DIVISOR
        if is_too_large or is_too_small:
            limits = "too large or too small" if positive else "too large"
            raise BadInput(f"the tensor '{name}' contains numbers that are {limits}.")
        return tensor

    def reject_unknown(self) -> None:
        """Raise BadInput if any tensor was not required."""
        if self._remaining:
            raise BadInput(f"unknown tensor '{min(self._remaining)[:80]}'.")


def _has_shape(tensor: NDArray[Any], shape: Shape) -> bool:
    """Return whether a tensor has this shape. None accepts any size from 1."""
    if tensor.ndim != len(shape) or 0 in tensor.shape:
        return False
    return all(expected in (None, size) for size, expected in zip(tensor.shape, shape, strict=True))


def _format_shape(shape: Shape) -> str:
    """Format a shape for error messages."""
    return " x ".join("any" if size is None else str(size) for size in shape) or "of a single number"


def check_feature_width(features: Vector, width: int) -> None:
    """Raise ArtifactError if the number of features is not as in training."""
    if features.shape[1] != width:
        raise ArtifactError(
            f"the gate expects {width} features but got {features.shape[1]}. Another LLM or embedding model computed them. Use "
            "the model that the gate was fitted with, or fit it again."
        )


def require_network(tensors: TensorValidator, prefix: str = "", width: int | None = None) -> None:
    """Check the tensors of an ensemble of networks. Example: '0.1.weight' has the weights of network 0, layer 1.

    Args:
        tensors: The tensors of the gate or arbiter.
        prefix: Start of the names of the ensemble's tensors.
        width: Expected number of features; None accepts any number.

    Raises:
        BadInput: A tensor is missing or wrong.
    """
    (width,) = tensors.require(f"{prefix}mean", width).shape
    tensors.require(f"{prefix}scale", width, positive=True)
    member = 0
    while member == 0 or f"{prefix}{member}.0.weight" in tensors:  # the first network must exist
        _require_member(tensors, f"{prefix}{member}.", width)
        member += 1


def _require_member(tensors: TensorValidator, prefix: str, width: int) -> None:
    """Check the weights and biases of one network of an ensemble, layer by layer.

    Args:
        tensors: The tensors of the gate or arbiter.
        prefix: Start of the names of the network's tensors.
        width: Number of features.
    """
    layer, n_inputs = 0, width
    while layer == 0 or f"{prefix}{layer}.weight" in tensors:  # the first layer must exist
        n_outputs = tensors.require(f"{prefix}{layer}.weight", None, n_inputs).shape[0]
        tensors.require(f"{prefix}{layer}.bias", n_outputs)
        layer, n_inputs = layer + 1, n_outputs  # the next layer reads the outputs of this one
    if n_outputs not in (1, 2):
        raise BadInput(
            f"the last layer '{prefix}{layer - 1}' of a network must have one or two outputs, not {n_outputs}."
        )


def apply_network(tensors: Tensors, features: Vector, prefix: str = "") -> FloatArray:
    """Apply an ensemble of networks to features, and average the predictions.

    Args:
        tensors: The tensors of the gate or arbiter.
        features: One row per question.
        prefix: Start of the names of the ensemble's tensors.

    Returns:
        The probability of the second class (retrieval needed), averaged over the members of the ensemble.
    """
    check_feature_width(features, len(tensors[f"{prefix}mean"]))
    inputs = _standardize(tensors, features, prefix)
    members = [_apply_member(tensors, f"{prefix}{member}.", inputs) for member in _list_members(tensors, prefix)]
    return np.asarray(np.mean(members, axis=0))


def compute_contributions(tensors: Tensors, features: Vector, prefix: str = "") -> FloatArray | None:
    """Compute how much each feature adds to the logit of a linear classifier.

    This is the standardized feature times its weight, averaged over the members of an ensemble.

    Returns:
        One row per question and one column per feature; None if the classifier is not linear.
    """
    slopes = []
    for member in _list_members(tensors, prefix):
        if f"{prefix}{member}.1.weight" in tensors:  # a network with a second layer is not linear
            return None
        weight = tensors[f"{prefix}{member}.0.weight"].astype(np.float64)  # one row per output
        # With two outputs (known, retrieval needed) the logit is their difference.
        slopes.append(weight[1] - weight[0] if len(weight) == 2 else weight[0])
    return np.asarray(np.mean(slopes, axis=0) * _standardize(tensors, features, prefix))


def _standardize(tensors: Tensors, features: Vector, prefix: str) -> FloatArray:
    """Subtract the mean of the features and divide by their scale."""
    return (features.astype(np.float64) - tensors[f"{prefix}mean"]) / tensors[f"{prefix}scale"]


def _list_members(tensors: Tensors, prefix: str) -> list[str]:
    """List the numbers of the networks in an ensemble. Example: '0.0.weight' and '1.0.weight' give ['0', '1']."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix) and name.endswith(".weight")]
    return sorted({name.split(".")[0] for name in names})


def _apply_member(tensors: Tensors, prefix: str, inputs: FloatArray) -> FloatArray:
    """Apply one network of an ensemble to standardized features, one row per question.

    Returns:
        The probability that retrieval is needed, which is the second of two classes.
    """
    depth = sum(name.startswith(prefix) and name.endswith(".weight") for name in tensors)
    outputs = inputs
    for layer in range(depth):
        outputs = outputs @ tensors[f"{prefix}{layer}.weight"].T.astype(np.float64) + tensors[f"{prefix}{layer}.bias"]
        if layer < depth - 1:
            outputs = np.maximum(outputs, 0.0)  # ReLU, except after the last layer
    if outputs.shape[1] == 1:
        return sigmoid(outputs[:, 0])
    return sigmoid(outputs[:, 1] - outputs[:, 0])  # the softmax of two outputs is the sigmoid of their difference


def apply_calibration(raw: FloatArray, calibration: Mapping[str, Any]) -> FloatArray:
    """Map raw scores to probabilities with the calibration of a manifest.

    Args:
        raw: Uncalibrated scores in [0, 1].
        calibration: Kind and parameters of the mapping. 'platt' is sigmoid(a * logit(raw) + b), where raw scores are
            clipped to [floor, 1 - floor]. 'isotonic' draws straight lines between the points (x, y). 'none' changes nothing.
    """
    if calibration["kind"] == "isotonic":
        probabilities = np.interp(raw, calibration["x"], calibration["y"])
    elif calibration["kind"] == "platt":
        logits = logit(raw, calibration.get("floor", PROBABILITY_FLOOR))
        probabilities = sigmoid(calibration["a"] * logits + calibration["b"])
    else:
        probabilities = np.clip(raw, 0.0, 1.0)
    return np.asarray(probabilities.astype(np.float64))
