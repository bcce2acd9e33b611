"""SeaKR: a model that does not know ends its sampled answers in states that lie far apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Self

from knowgate.data.signals.samples import (
    SEAKR,
    SEAKR_ALPHA,
    SEAKR_END,
    SEAKR_SAMPLES,
    SEAKR_SIZE,
    log_determinant,
    log_mean_square,
    relative_dispersion,
)
from knowgate.errors import BadSetting, NotOffered
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, ModelIdentity, Question, Reading, Signal, SignalRequest

PAPER_CENTER = -6.0  # the threshold of SeaKR's released settings; what readings without a size are measured by


@dataclass(frozen=True)
class SeakrGate(Gate):
    """need = how far apart the states Z are in which sampled answers end: (1 / n) log det(Z J Z^T + alpha I), between
    what it is if all end in one state (0) and if all are at right angles (1).

    States differ in length between LLMs, and so do their determinants: SeaKR's threshold of -6, which belongs to
    Llama-2-7B, retrieves for every question of the LLMs measured here. On the scale from 0 to 1, one half retrieved for
    1 to 92 % of Qwen2.5-Coder-1.5B's questions, by data set, and for all of SmolLM2-135M's, whose samples hardly ever
    agree (recorded runs, states one token earlier, lengths estimated). `center` given: need = logistic((u - center) /
    scale) instead, so that center -6 retrieves where the paper does; `standardised` takes both from recorded values.
    The order of the questions is nearly the same in all forms. layer None is the middle one.

    The state is that at the token that ends an answer; of an answer cut off by max_tokens, at its last. Label runs of
    older versions hold the number of one token earlier: it is measured by center -6, as it was then.

    Needs: hidden, samples. Cost per question: `n` sampled answers, one shared prefill.
    Reference: Yao et al. 2025 (SeaKR); the determinant is INSIDE's (Chen et al. 2024).
    Example:
        >>> round(SeakrGate(center=-6.0).need(-6.0), 2), round(SeakrGate(center=0, scale=2).need(2.0), 2)
        (0.5, 0.73)
        >>> round(SeakrGate(n=4).need(0.0, size=7.0), 2)
        0.31
    """

    n: int = SEAKR_SAMPLES
    layer: int | None = None
    center: float | None = None
    scale: float = 1.0
    alpha: float = SEAKR_ALPHA
    max_tokens: int = 32
    seed: int = 0
    needs = frozenset({Signal.HIDDEN, Signal.SAMPLES})

    def __post_init__(self) -> None:
        if self.n < 2 or self.max_tokens < 1:
            raise BadSetting(f"seakr: n is {self.n} and max_tokens {self.max_tokens}; use at least 2 and 1.")
        if not (self.scale > 0 and self.alpha > 0 and math.isfinite(self.center or 0.0)):
            raise BadSetting(f"seakr: scale {self.scale} and alpha {self.alpha} must be above 0, center a number.")

    @property
    def request(self) -> SignalRequest:
        return SignalRequest(
            samples=self.n, sample_tokens=self.max_tokens, seed=self.seed, sample_layer=self.layer, sample_end=True
        )

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        return self if self.layer is not None else replace(self, layer=model.depth // 2)

    def uncertainty(self, reading: Reading) -> float:
        """The number on record, which is that of the usual alpha; else that of the states at hand."""
        on_record = [reading.signals[name] for name in (SEAKR_END, SEAKR) if name in reading.signals]
        if self.alpha == SEAKR_ALPHA and on_record:
            return on_record[0]
        if reading.sample_states is None:
            raise NotOffered(
                "seakr: the reading has no states of sampled answers. Bind the gate to its model first; "
                f"label runs keep the uncertainty for alpha {SEAKR_ALPHA} only."
            )
        return log_determinant(reading.sample_states[: self.n], self.alpha)

    def need(self, uncertainty: float, size: float | None = None) -> float:
        """size: of the states, as `log_size` has it; None where an older label run does not say."""
        if self.center is None and size is not None:
            return relative_dispersion(uncertainty, size, self.n, self.alpha)
        center = PAPER_CENTER if self.center is None else self.center
        return sigmoid((uncertainty - center) / self.scale)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [self.need(self.uncertainty(reading), self._size(reading)) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        return [f"the sampled answers have uncertainty {self.uncertainty(reading):.2f}" for reading in readings]

    def _size(self, reading: Reading) -> float | None:
        if SEAKR_SIZE in reading.signals or reading.sample_states is None:
            return reading.signals.get(SEAKR_SIZE)
        return log_mean_square(reading.sample_states[: self.n])


def standardize(gate: SeakrGate, uncertainties: Sequence[float]) -> SeakrGate:
    """The gate with mean and deviation of these values (a label run's `signals["seakr_end"]`) as center and scale."""
    if len(uncertainties) < 2:
        raise BadSetting(f"seakr: {len(uncertainties)} values are too few to standardise by; label more questions.")
    return replace(gate, center=fmean(uncertainties), scale=pstdev(uncertainties) or 1.0)
