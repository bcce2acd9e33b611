"""What every backend does with `Sampling`: refuse what is none, and cut a distribution down to it.

Plain numpy, for one short distribution; `hf.decoding` does the same for batches of whole vocabularies.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadSetting
from knowgate.types import Prompt, Sampling, Want


def check_sampling(sampling: Sampling) -> None:
    """Raise unless answers can be drawn like this."""
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not (math.isfinite(temperature) and temperature > 0):
        raise BadSetting(f"sampling needs a temperature above 0, not {temperature}.")
    if not 0 < top_p <= 1:
        raise BadSetting(f"top_p is {top_p}; it must be above 0 and at most 1, which cuts nothing off.")
    if top_k < 0:
        raise BadSetting(f"top_k is {top_k}; it must be at least 0, which cuts nothing off.")


def sharpened(probabilities: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that is drawn from, in the order of the one given."""
    scaled = probabilities ** (1 / sampling.temperature)
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    best = scaled[order] / scaled[order].sum()
    best[np.cumsum(best) - best >= sampling.top_p] = 0
    shares = np.zeros_like(scaled)
    shares[order] = best / best.sum()
    return shares


def uniforms_of(prompt: Prompt, want: Want) -> NDArray[np.float64]:
    """Random numbers, one for each token of each sample, that depend on the seed and the prompt alone."""
    if want.seed is None:
        return np.random.default_rng().random((want.samples, want.sample_tokens))
    key = hashlib.sha256(f"{want.seed}\0{prompt.text}".encode()).digest()
    return np.random.default_rng(np.frombuffer(key, dtype=np.uint32)).random((want.samples, want.sample_tokens))
