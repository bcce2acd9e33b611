"""The tensors a fitted gate expects: each is claimed by name with its shape, and what nobody claims is refused.

Knows names, shapes and numbers; which tensors a gate has is declared in the gate's own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import ArtefactError, BadInput
from knowgate.types import Vector

LARGEST = 1e30  # a weight beyond overflows when it is used
SMALLEST = 1e-12  # what is divided by must be larger
Sizes = tuple[int | None, ...]


class ExpectedTensors:
    """Tensors of an artefact that wait to be claimed."""

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
        if float(np.abs(tensor).max()) > LARGEST or (positive and float(tensor.min()) < SMALLEST):
            raise BadInput(f"the tensor '{name}' holds numbers out of range.")
        return tensor

    def finish(self) -> None:
        """Refuse tensors that are not this gate's."""
        if self._waiting:
            raise BadInput(f"the tensor '{min(self._waiting)[:80]}' is not one of this gate's.")


def _fits(shape: tuple[int, ...], sizes: Sizes) -> bool:
    if len(shape) != len(sizes):
        return False
    return all(found >= 1 and wanted in (None, found) for found, wanted in zip(shape, sizes, strict=True))


def _shown(sizes: Sizes) -> str:
    return " x ".join("any" if size is None else str(size) for size in sizes) or "of a single number"


def check_width(features: Vector, width: int) -> None:
    """Refuse features of another width than the weights: a gate of another LLM or embedding."""
    if features.shape[1] != width:
        raise ArtefactError(
            f"the gate was fitted on features of {width} numbers and is given {features.shape[1]}: they come from "
            "another LLM or embedding. Use it with its own, or fit it on this one."
        )
