"""What is proven about a gate's threshold, and whether it holds where the gate is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.evidence import summarize_threshold
from knowgate.gates.fitted_gate import FittedGate
from knowgate.labels.options import count_shown_passages
from knowgate.types import Gate

FINGERPRINT_LENGTH = 16  # characters of a fingerprint that stands in a sentence


@dataclass(frozen=True)
class Deployment:
    """Where a gate is used. threshold: the user's, None for the gate's own; retriever: fingerprint, None for none.

    max_tokens: of an answer. open_prompts: fingerprint of how passages are put to the LLM. None: not known.
    reranker: fingerprint of what chooses the passages, from so many candidates; None where nothing does.
    at_times: it is left out where the retriever is sure. looks_twice: passages may be dropped by a second look.
    """

    threshold: float | None = None
    retriever: str | None = None
    k: int | None = None
    max_tokens: int | None = None
    open_prompts: str | None = None
    reranker: str | None = None
    candidates: int | None = None
    at_times: bool = False
    looks_twice: bool = False
    arbiter: str | None = None  # fingerprint of what chooses after retrieval; None for nothing


def describe_guarantee(gate: Gate, deployment: Deployment) -> str:
    """The guarantee in words, with whatever keeps it from holding here; '' for a gate without one."""
    evidence = _proof(gate)
    if evidence is None:
        return ""
    said = summarize_threshold(gate.threshold, "guarantee", evidence)
    against = find_violated_conditions(gate, deployment)
    return f"{said} This does not hold here: {'; '.join(against)}." if against else said


def find_violated_conditions(gate: Gate, deployment: Deployment) -> list[str]:
    """What keeps the guarantee from holding here; nothing where it holds, or where there is none."""
    evidence = _proof(gate)
    if evidence is None or not isinstance(gate, FittedGate):
        return []
    return list(_against(gate, deployment, evidence))


def get_proven_loss(gate: Gate, deployment: Deployment) -> float | None:
    """The share of the answers that is lost at most, as far as that is proven and holds here; None where it is not."""
    evidence = _proof(gate)
    return None if evidence is None or find_violated_conditions(gate, deployment) else float(evidence["epsilon"])


def has_guarantee_without_arbiter(gate: Gate) -> bool:
    """Whether something is proven about the gate with nobody choosing after retrieval."""
    evidence = _proof(gate)
    return evidence is not None and evidence.get("arbiter") is None


def _proof(gate: Gate) -> Mapping[str, Any] | None:
    """The evidence for a gate's guarantee; proven is what the calibrated need does, not a gate's own verdict."""
    if not isinstance(gate, FittedGate) or gate.verdict == "own":
        return None
    evidence: Mapping[str, Any] | None = gate.artifact.manifest.get("guarantee")
    return evidence


def _against(gate: FittedGate, deployment: Deployment, evidence: Mapping[str, Any]) -> Iterator[str]:
    if gate.note:
        yield "the gate decides for another LLM or wording than its own"
    if deployment.threshold is not None and deployment.threshold > gate.threshold:
        yield f"the threshold used is {deployment.threshold:g}"  # a stricter one loses less
    if evidence.get("form") == "net" and not _was_tested(deployment.threshold):
        yield f"the threshold used, {deployment.threshold}, was not tested"  # net of gains a stricter one may lose more
    if deployment.retriever is None or (gate.threshold == ALWAYS_RETRIEVE and not evidence.get("arbiter")):
        return
    made = evidence["retriever"]
    if made["fingerprint"] != deployment.retriever:
        yield (
            f"it was shown for passages from {made['name']} ({_brief(made['fingerprint'])}), not for those of this "
            f"index ({_brief(deployment.retriever)})"
        )
    shown = count_shown_passages(evidence["k"], made["fingerprint"])
    if shown not in (None, deployment.k):
        yield f"it was shown for {shown} passages, not for {deployment.k}"
    if _differ(longest := evidence.get("max_tokens"), deployment.max_tokens):
        yield f"it was shown for answers of up to {longest} tokens, not {deployment.max_tokens}"
    if _differ(wording := evidence.get("open_prompts"), deployment.open_prompts):
        two = f"{_brief(wording)}, not {_brief(deployment.open_prompts)}"
        yield f"it was shown for another wording of questions with passages ({two})"
    yield from _against_weighing(deployment, evidence.get("arbiter"))
    yield from _against_ranking(deployment, evidence.get("reranker"))
    if deployment.looks_twice:
        yield "it was shown without a second look at the passages"


def _against_weighing(deployment: Deployment, weighed: Mapping[str, Any] | None) -> Iterator[str]:
    if weighed is None:
        if deployment.arbiter is not None:
            yield "it was shown without an arbiter"
    elif weighed["fingerprint"] != deployment.arbiter:
        yield f"it was shown with the arbiter '{weighed['name']}' ({_brief(weighed['fingerprint'])})"


def _against_ranking(deployment: Deployment, made: Mapping[str, Any] | None) -> Iterator[str]:
    """Other passages than it was shown for: chosen by another reranker, by none, from more, or not always."""
    if made is None:
        if deployment.reranker is not None:
            yield "it was shown without reranking"
        return
    if deployment.reranker != made["fingerprint"]:
        used = f"by this one ({_brief(deployment.reranker)})" if deployment.reranker else "as they are found"
        own = f"{made['name']} ({_brief(made['fingerprint'])})"
        yield f"it was shown for passages chosen by the reranker {own}, not {used}"
    elif _differ(made.get("candidates"), deployment.candidates):
        yield f"it was shown for passages chosen from {made['candidates']} candidates, not {deployment.candidates}"
    elif deployment.at_times:
        yield "it was shown for passages that were always reranked"


def _was_tested(threshold: float | None) -> bool:
    """Whether it is of the grid that the walk went along: then, stricter than the gate's own, it is proven, too."""
    return threshold is None or round(threshold, 3) == threshold


def _brief(fingerprint: str | None) -> str:
    """As much of it as tells two apart in a sentence."""
    if not fingerprint:
        return "no fingerprint"
    return fingerprint if len(fingerprint) <= FINGERPRINT_LENGTH else f"{fingerprint[:FINGERPRINT_LENGTH]}…"


def _differ(proven: object, used: object) -> bool:
    """Guarantees of older versions do not say everything, and neither does every user."""
    return proven is not None and used is not None and proven != used
