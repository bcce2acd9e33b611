"""The constant gate: what a policy stores if retrieving always, or never, is best for its LLM and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question, Reading

CONSTANT_NEED = 0.5


@dataclass(frozen=True)
class ConstantGate(FittedGate):
    """Gives every question the same need, so that its threshold alone decides: always or never retrieve.

    Needs: nothing. Cost per question: none.
    Reference: ours; `knowgate fit` without a gate name writes it if no gate pays.

    Example:
        >>> gate = ConstantGate.load("my-policy")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the folder holds weights, which a constant does not have."""
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Return the same score for every question."""
        return np.full(len(questions), CONSTANT_NEED)
