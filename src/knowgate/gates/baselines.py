"""Baselines that every gate is compared with: `always`, `never`, `random`, and the constant that a policy stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import TensorValidator
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Gate, Question, Reading

CONSTANT_NEED = 0.5
CONSTANT_GATE = "constant"  # name of the gate that decides the same for every question


@dataclass(frozen=True)
class ConstantGate(FittedGate):
    """Gives every question the same need for retrieval. So the threshold alone decides: always or never retrieve.

    Needs: nothing. Cost per question: none.
    Reference: ours. `knowgate fit` writes this gate if no other gate is better.

    Example:
        >>> gate = ConstantGate.load("my-policy")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the folder holds weights, which a constant does not have."""
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Return the same score for every question."""
        return np.full(len(questions), CONSTANT_NEED)


@dataclass(frozen=True)
class AlwaysGate(Gate):
    """Retrieves for every question, like plain RAG.

    With `unless='rules'`, rules can still skip small talk and the like.

    Needs: nothing. Cost per question: none for the decision, one retrieval.

    Example:
        >>> AlwaysGate().score([Question("Hi")], [Reading()])
        [1.0]
    """

    unless: Literal["nothing", "rules"] = "nothing"
    is_pure = True  # `score` is a short computation that uses no model, file or network

    @property
    def obeys_rules(self) -> bool:
        """Whether rules may decide before this gate and skip questions."""
        return self.unless == "rules"

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return need 1 for every question."""
        return [1.0 for _ in questions]


@dataclass(frozen=True)
class NeverGate(Gate):
    """Never retrieves. The need for retrieval is always 0, and rules cannot change that.

    Needs: nothing. Cost per question: none.

    Example:
        >>> NeverGate().score([Question("Hi")], [Reading()])
        [0.0]
    """

    obeys_rules = False
    is_pure = True  # `score` is a short computation that uses no model, file or network

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return need 0 for every question."""
        return [0.0 for _ in questions]


@dataclass(frozen=True)
class RandomGate(Gate):
    """Retrieves for a random share `rate` of the questions. A useful gate must be more accurate than this at the same rate.

    Needs: nothing. Cost per question: none.

    Example:
        >>> RandomGate(rate=0.3).threshold
        0.7
    """

    rate: float = 0.5
    seed: int = 0  # of the random numbers

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise BadSetting(f"gate 'random': rate is {self.rate}, but it must be between 0 and 1.")

    @property
    def threshold(self) -> float:
        """The threshold that a share `rate` of the uniform scores exceeds."""
        return 1 - self.rate

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return a uniform random need for retrieval for every question."""
        return [self._draw_uniform(question) for question in questions]

    def _draw_uniform(self, question: Question) -> float:
        """Hash a question to a number between 0 and 1. The number is never exactly 0 or 1."""
        digits = sha256_text(str(self.seed), question.id, question.text)[:13]  # 13 hex digits fit a double
        return (int(digits, 16) + 0.5) / 16**13
