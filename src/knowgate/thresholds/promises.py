"""What is proven about a gate's threshold, and whether it holds where the gate is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.gates import ALWAYS, FittedGate
from knowgate.labels import passages_shown
from knowgate.thresholds.evidence import sentence
from knowgate.types import Gate


@dataclass(frozen=True)
class Deployment:
    """Where a gate is used. threshold: the user's, None for the gate's own; retriever: fingerprint, None for none."""

    threshold: float | None = None
    retriever: str | None = None
    k: int | None = None
    reorders: bool = False  # passages are reranked, or dropped by a second look


def promise(gate: Gate, deployment: Deployment) -> str:
    """The guarantee in words, with whatever keeps it from holding here; '' for a gate without one."""
    evidence = gate.artefact.manifest.get("guarantee") if isinstance(gate, FittedGate) else None
    if not (isinstance(gate, FittedGate) and evidence) or gate.verdict == "own":
        return ""  # proven is what the calibrated need does
    said = sentence(gate.threshold, "guarantee", evidence)
    against = list(_against(gate, deployment, evidence))
    return f"{said} This does not hold here: {'; '.join(against)}." if against else said


def _against(gate: FittedGate, deployment: Deployment, evidence: Mapping[str, Any]) -> Iterator[str]:
    if gate.note:
        yield "the gate decides for another LLM than its own"
    if deployment.threshold is not None and deployment.threshold > gate.threshold:
        yield f"the threshold used is {deployment.threshold:g}"  # a stricter one loses less
    if deployment.retriever is None or gate.threshold == ALWAYS:
        return
    made = evidence["retriever"]
    if made["fingerprint"] != deployment.retriever:
        yield f"it was shown for passages from {made['name']} ({made['fingerprint'] or 'no fingerprint'}), not for those of this index ({deployment.retriever})"  # noqa: E501
    shown = passages_shown(evidence["k"], made["fingerprint"])
    if shown not in (None, deployment.k):
        yield f"it was shown for {shown} passages, not for {deployment.k}"
    if deployment.reorders:
        yield "it was shown without reranking or a second look"
