"""The gate of SeaKR: if the LLM does not know an answer, its sampled answers end in very different hidden states.

SeaKR's threshold of -6 is for Llama-2-7B and retrieves for every question of the LLMs measured here. On the relative
scale of `SeakrGate`, a threshold of one half retrieved for 1 to 92 % of the questions of Qwen2.5-Coder-1.5B, depending on
the data set. It retrieved for all questions of SmolLM2-135M, whose samples rarely agree. These numbers are from recorded
runs, with states one token earlier and estimated lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from knowgate.data.signals import samples
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.stats.metrics import sigmoid
from knowgate.types import Gate, ModelIdentity, Question, Reading, Signal, SignalRequest

PAPER_CENTER = -6.0  # threshold of SeaKR's released settings; also used for readings without the size of the states


@dataclass(frozen=True)
class SeakrGate(Gate):
    """Retrieves if the hidden states at the end of sampled answers differ widely.

    The uncertainty of n samples is u = (1 / n) log det(Z J Z^T + alpha I). The rows of Z are the hidden states, and J
    subtracts from each state its own mean. By default, the need is u on a relative scale from 0 for equal states to 1
    for orthogonal states. If `center` is set, the need is sigmoid(u - center). With a center of -6, the gate decides
    as in the paper.

    The state is read in the middle layer, or in `layer`, at the last token of an answer.

    Needs: hidden, samples. Cost per question: `n` sampled answers with a common prefill.
    Reference: Yao et al. 2025 (SeaKR). The determinant is from INSIDE (Chen et al. 2024).

    Example:
        >>> round(SeakrGate(center=-6.0).compute_need(-6.0), 2)
        0.5
        >>> round(SeakrGate(n=4).compute_need(0.0, size=7.0), 2)
        0.31
    """

    n: int = samples.SEAKR_SAMPLES  # number of sampled answers
    layer: int | None = None
    center: float | None = None
    max_tokens: int = 32  # of a sampled answer
    seed: int = 0  # of the sampling
    needs = frozenset({Signal.HIDDEN, Signal.SAMPLES})

    def __post_init__(self) -> None:
        """Raise BadSetting if an option is out of range."""
        if self.n < 2 or self.max_tokens < 1:
            raise BadSetting(
                f"gate 'seakr': n is {self.n} and max_tokens is {self.max_tokens}. Set n to at least 2, and max_tokens to at "
                "least 1."
            )
        if not math.isfinite(self.center or 0.0):
            raise BadSetting(f"gate 'seakr': center is {self.center}, but it must be a finite number.")

    @property
    def request(self) -> SignalRequest:
        """Request sampled answers and the hidden state at the end of each."""
        return SignalRequest(
            samples=self.n, sample_tokens=self.max_tokens, seed=self.seed, sample_layer=self.layer, sample_end=True
        )

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return a copy that reads the middle layer of the model if no layer is set."""
        return self if self.layer is not None else replace(self, layer=model.depth // 2)

    def compute_uncertainty(self, reading: Reading) -> float:
        """Return how much the hidden states of sampled answers differ. Recorded values of label runs are reused.

        Raises:
            UnsupportedSignal: There is no recorded value and no hidden state.
        """
        # Older label runs recorded only SEAKR, from states one token before the end of the answer.
        for name in (samples.SEAKR_END, samples.SEAKR):
            if name in reading.signals:
                return reading.signals[name]
        if reading.sample_states is None:
            raise UnsupportedSignal(
                "gate 'seakr' needs the hidden states of sampled answers, but there are none. Bind the gate to its "
                "model first."
            )
        return samples.log_determinant(reading.sample_states[: self.n], samples.SEAKR_ALPHA)

    def compute_need(self, uncertainty: float, size: float | None = None) -> float:
        """Convert the uncertainty of a question to its need for retrieval.

        With a `center`, the need is sigmoid(uncertainty - center). Without a center, the need is the uncertainty on a
        scale from 0 for equal to 1 for orthogonal hidden states. This scale depends on `size`; if `size` is unknown, the
        center of the paper is used.

        Args:
            uncertainty: Value of `compute_uncertainty`.
            size: Logarithm of the mean squared length of the hidden states; None if it is unknown.
        """
        if self.center is None and size is not None:
            return samples.relative_dispersion(uncertainty, size, self.n, samples.SEAKR_ALPHA)
        center = PAPER_CENTER if self.center is None else self.center
        return sigmoid(uncertainty - center)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval of each question from the spread of its sampled answers."""
        return [self.compute_need(self.compute_uncertainty(reading), self._get_size(reading)) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """State the uncertainty of the sampled answers."""
        return [f"the sampled answers have uncertainty {self.compute_uncertainty(reading):.2f}" for reading in readings]

    def _get_size(self, reading: Reading) -> float | None:
        """Return the log of the mean squared length of the hidden states, or None."""
        if samples.SEAKR_SIZE in reading.signals:
            return reading.signals[samples.SEAKR_SIZE]
        if reading.sample_states is None:
            return None
        return samples.log_mean_square(reading.sample_states[: self.n])
