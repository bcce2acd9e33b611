"""What the fit function of an arbiter gives back. Knows nothing of how it was fitted, nor of where it will be kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from knowgate.gates import Tensors
from knowgate.statistics import Floats
from knowgate.types import Signal


@dataclass(frozen=True)
class ArbiterResult:
    """The arbiter's name in the table, its options, what it must be shown, and its weights.

    raw: of the pairs at these places, how probably the answer from memory and the one with passages are right, two
    columns in [0, 1]. is_calibrated: they are probabilities already; else they are made so on the calibration split.
    notes: lines for the card. learnt_all: every pair taught it, the held-out ones too, which `raw` scores with a part
    of it that did not see them.
    """

    arbiter: str
    options: Mapping[str, Any]
    needs: frozenset[Signal]
    wants_passages: bool
    raw: Callable[[Sequence[int]], Floats]
    tensors: Tensors = field(default_factory=dict)
    is_calibrated: bool = False
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    learnt_all: bool = False
