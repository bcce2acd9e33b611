"""What a fit function gives back. Knows nothing of how it was fitted, nor of where it will be kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from knowgate.gates import Tensors
from knowgate.statistics import Floats
from knowgate.types import Signal, Want


@dataclass(frozen=True)
class FitResult:
    """What a fit gives: the gate's name and options, what it must read, and its weights.

    raw: uncalibrated need of the given row numbers. notes: lines for the card. learnt_all: every row taught it, the
    held-out ones too, which `raw` scores with a part of it that did not see them.
    """

    gate: str
    options: Mapping[str, Any]
    needs: frozenset[Signal]
    want: Want
    tensors: Tensors
    raw: Callable[[Sequence[int]], Floats]
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    learnt_all: bool = False
