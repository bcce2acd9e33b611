"""CBDR's probe: what the middle of the network knows about knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.errors import NotOffered
from knowgate.gates.calibration import Floats
from knowgate.gates.fitted import FittedGate
from knowgate.gates.network import apply_network
from knowgate.types import Question, Reading, Vector


@dataclass(frozen=True)
class ProbeGate(FittedGate):
    """need = a small network's reading of one hidden state, before the answer or after the draft.

    Needs: hidden. Cost per question: less than 1 % of the pass; before the answer, a retrieved question pays half a
    prefill and nothing else.
    Reference: Jin et al. (CBDR), section 3.1.
    Example:
        >>> gate = ProbeGate.load("my-probe")  # doctest: +SKIP
    """

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        options = self.artefact.options
        return apply_network(self.artefact.tensors, states(readings, options["layer"], options["position"]))


def states(readings: Sequence[Reading], layer: int, position: str) -> Vector:
    """The hidden states of a layer: `pre` at the last prompt token, `post` at the last drafted one."""
    found = [(reading.hidden if position == "pre" else reading.hidden_after).get(layer) for reading in readings]
    missing = [state for state in found if state is None]
    if missing:
        raise NotOffered(
            f"the reading has no hidden states of layer {layer} ({position}). Label with --layers {layer}, or use "
            "a backend that gives hidden states (hf, gguf, smollm)."
        )
    return np.stack([state for state in found if state is not None])
