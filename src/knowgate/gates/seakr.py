"""SeaKR: a model that does not know ends its sampled answers in states that lie far apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Self

from knowgate.errors import BadSetting, NotOffered
from knowgate.signals import ALPHA, SAMPLES, SEAKR, log_determinant
from knowgate.statistics import sigmoid
from knowgate.types import Gate, ModelIdentity, Question, Reading, Signal, Want


@dataclass(frozen=True)
class SeakrGate(Gate):
    """need = logistic((u - center) / scale), u = (1 / n) log det(Z J Z^T + alpha I) of the samples' end states Z.

    Unfitted, center is the threshold of SeaKR's released settings, -6, and scale 1: need is above 0.5 where the paper
    retrieves. States differ in size between models, so `standardised` takes center and scale from values that
    `knowgate label --seakr` recorded; the order of the questions is the same either way.
    layer None is the middle one.

    Needs: hidden, samples. Cost per question: `n` sampled answers, one shared prefill.
    Reference: Yao et al. 2025 (SeaKR); the determinant is INSIDE's (Chen et al. 2024).
    Example:
        >>> round(SeakrGate().need(-6.0), 2), round(SeakrGate(center=0, scale=2).need(2.0), 2)
        (0.5, 0.73)
    """

    n: int = SAMPLES
    layer: int | None = None
    center: float = -6.0
    scale: float = 1.0
    alpha: float = ALPHA
    max_tokens: int = 32
    seed: int = 0
    needs = frozenset({Signal.HIDDEN, Signal.SAMPLES})

    def __post_init__(self) -> None:
        if self.n < 2 or self.max_tokens < 1:
            raise BadSetting(f"seakr: n is {self.n} and max_tokens {self.max_tokens}; use at least 2 and 1.")
        if not (self.scale > 0 and self.alpha > 0 and math.isfinite(self.center)):
            raise BadSetting(f"seakr: scale {self.scale} and alpha {self.alpha} must be above 0, center a number.")

    @property
    def want(self) -> Want:
        return Want(samples=self.n, sample_tokens=self.max_tokens, seed=self.seed, sample_layer=self.layer)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        return self if self.layer is not None else replace(self, layer=model.depth // 2)

    def uncertainty(self, reading: Reading) -> float:
        """The number on record, which is that of the usual alpha; else that of the states at hand."""
        if self.alpha == ALPHA and SEAKR in reading.signals:
            return reading.signals[SEAKR]
        if reading.sample_states is None:
            raise NotOffered(
                "seakr: the reading has no states of sampled answers. Bind the gate to its model first; "
                f"label runs keep the uncertainty for alpha {ALPHA} only."
            )
        return log_determinant(reading.sample_states[: self.n], self.alpha)

    def need(self, uncertainty: float) -> float:
        return sigmoid((uncertainty - self.center) / self.scale)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [self.need(self.uncertainty(reading)) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        return [f"the sampled answers have uncertainty {self.uncertainty(reading):.2f}" for reading in readings]


def standardised(gate: SeakrGate, uncertainties: Sequence[float]) -> SeakrGate:
    """The gate with the mean and deviation of these values (a label run's `signals["seakr"]`) as center and scale."""
    if len(uncertainties) < 2:
        raise BadSetting(f"seakr: {len(uncertainties)} values are too few to standardise by; label more questions.")
    return replace(gate, center=fmean(uncertainties), scale=pstdev(uncertainties) or 1.0)
