"""A fitted gate from a package of your own: how long the question is, and whether longer means harder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.gates.fitted_gate import FittedGate
from knowgate.training.examples import Examples
from knowgate.training.fit_function import FitResult
from knowgate.types import Question, Reading, SignalRequest

Unit = Literal["words", "characters"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LengthGate(FittedGate):
    """need rises (or falls, as fitted) with the length of the question.

    Needs: nothing. Cost per question: none.
    """

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        return need(lengths(questions, self.artifact.options["unit"]), self.artifact.tensors["curve"])


def fit_length(
    examples: Examples,
    *,
    unit: Annotated[Unit, "What is counted: words or characters."] = "words",
) -> FitResult:
    """The middle of the lengths, and which side of it is the harder one."""
    counted = lengths(examples.questions, unit)
    train = examples.split.train
    middle, spread = np.median(counted[train]), np.std(counted[train]) or 1.0
    side = np.sign(np.cov(counted[train], examples.needed[train])[0, 1])
    curve = np.array([middle, side / spread])

    def raw(places: Sequence[int]) -> Floats:
        return need(counted[list(places)], curve)

    return FitResult("length", {"unit": unit}, frozenset(), SignalRequest(), {"curve": curve}, raw)


def lengths(questions: Sequence[Question], unit: Unit) -> Floats:
    texts = [question.text for question in questions]
    return np.array([len(text.split()) if unit == "words" else len(text) for text in texts], dtype=np.float64)


def need(counted: Floats, curve: Floats) -> Floats:
    """A logistic curve: 1/2 at the middle."""
    middle, slope = curve
    return np.asarray(1 / (1 + np.exp(-slope * (counted - middle))))
