"""The arbiter `rules` as a folder: what `knowgate fit arbiter` writes if no trained arbiter is better."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair


class FittedRulesArbiter(FittedArbiter):
    """Gives the closed-book answer if only the open-book answer says that it cannot tell.

    Needs: the texts of both answers. Cost: nothing beyond the closed-book answer.
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the folder holds weights, which rules do not have."""
        tensors.finish()

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Return the beliefs of the rules, closed-book and open-book."""
        return estimate_by_rules(answers)


def estimate_by_rules(answers: Sequence[AnswerPair]) -> FloatArray:
    """Return the beliefs of the rules arbiter as a matrix: closed-book, open-book."""
    beliefs = RULES_ARBITER.estimate(answers)
    return np.array([[belief.closed, belief.open] for belief in beliefs]).reshape(len(answers), 2)
