"""CBDR's probe: what the middle of the network knows about knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.manifest import Position
from knowgate.gates.fitted.network import apply_network, expect_network
from knowgate.gates.fitted.probability import Floats
from knowgate.gates.fitted.tensors import ExpectedTensors
from knowgate.signals import hidden_states
from knowgate.typed import read_record
from knowgate.types import Question, Reading


@dataclass(frozen=True)
class ProbeOptions:
    layer: int
    position: Position
    kind: Literal["mlp", "linear"] = "mlp"


@dataclass(frozen=True)
class ProbeGate(FittedGate):
    """need = a small network's reading of one hidden state, before the answer or after the draft.

    Needs: hidden. Cost per question: less than 1 % of the pass; before the answer, a retrieved question pays half a
    prefill and nothing else.
    Reference: Jin et al. (CBDR), section 3.1.
    Example:
        >>> gate = ProbeGate.load("my-probe")  # doctest: +SKIP
    """

    def check(self, tensors: ExpectedTensors) -> None:
        read_record(ProbeOptions, self.artefact.options, "options", others=True)
        expect_network(tensors)
        tensors.finish()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        options = self.artefact.options
        return apply_network(self.artefact.tensors, hidden_states(readings, options["layer"], options["position"]))
