"""What a request demands of the threshold: at most so much may be lost. Where that is not proven, it is looked up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.errors import KnowgateError
from knowgate.pipeline import AdaptiveRAG
from knowgate.types import Gate, Question, Reading

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnprovenGate(Gate):
    """Stands in for a gate of which nothing good enough is proven: need = 1."""

    name: str = ""
    max_loss: float = 0.0
    may_be_overruled = False
    is_quick = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        said = f"it is not proven here that skipping loses at most {self.max_loss:.2%} of the answers"
        return [said for _ in questions]


def held_to(rag: AdaptiveRAG, max_loss: float) -> AdaptiveRAG:
    """The pipeline, if its threshold is proven to lose no more; else one that always retrieves and says why."""
    try:
        proven = rag.proven_loss
    except KnowgateError as error:  # whose documents cannot be told, of that nothing is proven
        log.warning("what is proven of the gate '%s' cannot be told: %s", rag.gate.name, error)
        proven = None
    if proven is not None and proven <= max_loss:
        return rag
    return rag.altered(gate=UnprovenGate(rag.gate.name, max_loss), threshold=None)
