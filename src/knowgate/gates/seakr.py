"""SeaKR: sampled answers of an LLM that does not know end in hidden states that are far apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Self

from knowgate.data.signals import samples
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, ModelIdentity, Question, Reading, Signal, SignalRequest

PAPER_CENTER = -6.0  # threshold of SeaKR's released settings; also used for readings without the size of the states


@dataclass(frozen=True)
class SeakrGate(Gate):
    """Scores by the dispersion of the hidden states Z in which sampled answers end.

    The uncertainty is u = (1 / n) log det(Z J Z^T + alpha I). The need is u on a scale from 0 (all samples end in the
    same state) to 1 (all states are orthogonal). With `center`, need = sigmoid((u - center) / scale) instead; center
    -6 retrieves where the paper does, and `standardize` derives both from recorded values. The order of the questions
    is nearly the same in all forms.

    The relative scale is the default because the length of states differs between LLMs: SeaKR's threshold of -6 is for
    Llama-2-7B and retrieves for every question of the LLMs measured here. On the relative scale, a threshold of one
    half retrieved for 1 to 92 % of the questions of Qwen2.5-Coder-1.5B, depending on the data set, and for all of
    SmolLM2-135M, whose samples rarely agree (recorded runs, states one token earlier, lengths estimated).

    The state is read at the token that ends an answer, or at the last token if `max_tokens` cut it off. Label runs of
    older versions hold the value of one token earlier, which is scored with center -6. `layer=None` is the middle one.

    Needs: hidden, samples. Cost per question: `n` sampled answers, one shared prefill.
    Reference: Yao et al. 2025 (SeaKR); the determinant is from INSIDE (Chen et al. 2024).

    Example:
        >>> round(SeakrGate(center=-6.0).compute_need(-6.0), 2)
        0.5
        >>> round(SeakrGate(center=0, scale=2).compute_need(2.0), 2)
        0.73
        >>> round(SeakrGate(n=4).compute_need(0.0, size=7.0), 2)
        0.31
    """

    n: int = samples.SEAKR_SAMPLES
    layer: int | None = None
    center: float | None = None
    scale: float = 1.0
    alpha: float = samples.SEAKR_ALPHA
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
        """Ask for samples with the hidden states at their ends."""
        return SignalRequest(
            samples=self.n, sample_tokens=self.max_tokens, seed=self.seed, sample_layer=self.layer, sample_end=True
        )

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Use the middle layer of the model if none is set."""
        return self if self.layer is not None else replace(self, layer=model.depth // 2)

    def compute_uncertainty(self, reading: Reading) -> float:
        """Return the recorded uncertainty, or compute it from the states of the samples."""
        names = (samples.SEAKR_END, samples.SEAKR)
        recorded = [reading.signals[name] for name in names if name in reading.signals]
        if self.alpha == samples.SEAKR_ALPHA and recorded:
            return recorded[0]
        if reading.sample_states is None:
            raise UnsupportedSignal(
                "seakr: the reading has no states of sampled answers. Bind the gate to its model first; label runs "
                f"record the uncertainty for alpha={samples.SEAKR_ALPHA} only."
            )
        return samples.log_determinant(reading.sample_states[: self.n], self.alpha)

    def compute_need(self, uncertainty: float, size: float | None = None) -> float:
        """Convert an uncertainty to a need.

        Args:
            uncertainty: Value of `compute_uncertainty`.
            size: Logarithm of the mean squared length of the states; None if an older label run did not record it.
        """
        if self.center is None and size is not None:
            return samples.relative_dispersion(uncertainty, size, self.n, self.alpha)
        center = PAPER_CENTER if self.center is None else self.center
        return sigmoid((uncertainty - center) / self.scale)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute needs from the dispersion of the sampled answers."""
        return [self.compute_need(self.compute_uncertainty(reading), self._get_size(reading)) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """State the uncertainty of the sampled answers."""
        return [f"the sampled answers have uncertainty {self.compute_uncertainty(reading):.2f}" for reading in readings]

    def _get_size(self, reading: Reading) -> float | None:
        """Return the recorded or computed size of the states."""
        if samples.SEAKR_SIZE in reading.signals or reading.sample_states is None:
            return reading.signals.get(samples.SEAKR_SIZE)
        return samples.log_mean_square(reading.sample_states[: self.n])


def standardize(gate: SeakrGate, uncertainties: Sequence[float]) -> SeakrGate:
    """Return a copy whose center and scale are the mean and standard deviation of recorded uncertainties.

    Args:
        gate: The gate to copy.
        uncertainties: Values of `signals["seakr_end"]` of a label run.
    """
    if len(uncertainties) < 2:
        raise BadSetting(f"seakr: {len(uncertainties)} values are too few to standardize; label more questions.")
    return replace(gate, center=fmean(uncertainties), scale=pstdev(uncertainties) or 1.0)
