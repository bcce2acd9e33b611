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
    """Where a gate is used. threshold: the user's, None for the gate's own; retriever: fingerprint, None for none.

    max_tokens: of an answer. open_prompts: fingerprint of how passages are put to the LLM. None: not known.
    """

    threshold: float | None = None
    retriever: str | None = None
    k: int | None = None
    reorders: bool = False  # passages are reranked, or dropped by a second look
    max_tokens: int | None = None
    open_prompts: str | None = None
    arbiter: str | None = None  # fingerprint of what chooses after retrieval; None for nothing


def promise(gate: Gate, deployment: Deployment) -> str:
    """The guarantee in words, with whatever keeps it from holding here; '' for a gate without one."""
    evidence = _proof(gate)
    if evidence is None:
        return ""
    said = sentence(gate.threshold, "guarantee", evidence)
    against = objections(gate, deployment)
    return f"{said} This does not hold here: {'; '.join(against)}." if against else said


def objections(gate: Gate, deployment: Deployment) -> list[str]:
    """What keeps the guarantee from holding here; nothing where it holds, or where there is none."""
    evidence = _proof(gate)
    if evidence is None or not isinstance(gate, FittedGate):
        return []
    return list(_against(gate, deployment, evidence))


def is_proven_alone(gate: Gate) -> bool:
    """Whether something is proven about the gate with nobody choosing after retrieval."""
    evidence = _proof(gate)
    return evidence is not None and evidence.get("arbiter") is None


def _proof(gate: Gate) -> Mapping[str, Any] | None:
    """The evidence for a gate's guarantee; proven is what the calibrated need does, not a gate's own verdict."""
    if not isinstance(gate, FittedGate) or gate.verdict == "own":
        return None
    evidence: Mapping[str, Any] | None = gate.artefact.manifest.get("guarantee")
    return evidence


def _against(gate: FittedGate, deployment: Deployment, evidence: Mapping[str, Any]) -> Iterator[str]:
    if gate.note:
        yield "the gate decides for another LLM or wording than its own"
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
    if _differ(longest := evidence.get("max_tokens"), deployment.max_tokens):
        yield f"it was shown for answers of up to {longest} tokens, not {deployment.max_tokens}"
    if _differ(wording := evidence.get("open_prompts"), deployment.open_prompts):
        yield f"it was shown for another wording of questions with passages ({wording}, not {deployment.open_prompts})"
    if (weighed := evidence.get("arbiter")) is None:
        if deployment.arbiter is not None:
            yield "it was shown without an arbiter"
    elif weighed["fingerprint"] != deployment.arbiter:
        yield f"it was shown with the arbiter '{weighed['name']}' ({weighed['fingerprint']})"
    if deployment.reorders:
        yield "it was shown without reranking or a second look"


def _differ(proven: object, used: object) -> bool:
    """Guarantees of older versions do not say everything, and neither does every user."""
    return proven is not None and used is not None and proven != used
