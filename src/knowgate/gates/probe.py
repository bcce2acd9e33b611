"""CBDR's probe: what the middle of the network knows about knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.network import apply_network
from knowgate.gates.fitted.probability import Floats
from knowgate.signals import hidden_states
from knowgate.types import Question, Reading


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
        return apply_network(self.artefact.tensors, hidden_states(readings, options["layer"], options["position"]))
