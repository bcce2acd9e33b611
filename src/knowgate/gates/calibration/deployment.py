"""Checks whether the guarantee of a gate holds in the setup where the gate is used.

A guarantee says that the gate loses at most a given accuracy against always retrieving. It was proven for one setup:
LLM, prompts, retriever, passages, reranker and arbiter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from knowgate.data.runs.folder import is_recorded_model, strip_model_prefix
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.evidence import summarize_threshold
from knowgate.gates.fitted_gate import FittedGate
from knowgate.labels.options import count_shown_passages
from knowgate.types import Gate

RECORDED_CAVEAT = "Its loss was measured on recorded answers, with the documents of that time."


@dataclass(frozen=True)
class Deployment:
    """The setup for using a gate. Unless stated otherwise, None means unknown.

    Attributes:
        threshold: Threshold set by the user; None if the gate's own threshold is used.
        retriever: Fingerprint of the retriever; None without one.
        k: Number of passages that the LLM sees.
        max_tokens: Maximum length of an answer.
        open_prompts: Fingerprint of the prompts for questions with passages.
        reranker: Fingerprint of the reranker; None without one.
        candidates: Number of passages that the reranker chooses from.
        reranks_sometimes: Whether reranking is skipped for questions where the retriever is confident.
        filters_passages: Whether a passage filter (second look) may drop passages after retrieval.
        arbiter: Fingerprint of the arbiter; None without one.
    """

    threshold: float | None = None
    retriever: str | None = None
    k: int | None = None
    max_tokens: int | None = None
    open_prompts: str | None = None
    reranker: str | None = None
    candidates: int | None = None
    reranks_sometimes: bool = False
    filters_passages: bool = False
    arbiter: str | None = None


def describe_guarantee(gate: Gate, deployment: Deployment) -> str:
    """Say how much accuracy a gate loses at most, and whether this holds here."""
    guarantee = _get_guarantee(gate)
    if guarantee is None:
        return ""
    summary = summarize_threshold(gate.threshold, "guarantee", guarantee)
    violations = find_violated_conditions(gate, deployment)
    if violations:
        return f"{summary} This does not hold here: {'; '.join(violations)}."
    return f"{summary} {RECORDED_CAVEAT}" if is_fitted_on_recorded(gate) else summary


def is_fitted_on_recorded(gate: Gate) -> bool:
    """Return whether a gate was fitted on imported answers. Their index and prompts are unknown."""
    return isinstance(gate, FittedGate) and is_recorded_model(str(gate.artifact.manifest["model"]["name"]))


def describe_recorded_origin(gate: Gate) -> str:
    """Return a warning if a gate was fitted on imported answers, else ''."""
    if not isinstance(gate, FittedGate) or not is_fitted_on_recorded(gate):
        return ""
    name = strip_model_prefix(str(gate.artifact.manifest["model"]["name"]))
    return (
        f"The gate '{gate.artifact.path.name}' was fitted on recorded answers of '{name}'. Make sure that the server "
        f"runs the same LLM. {RECORDED_CAVEAT}"
    )


def describe_missing_calibration(gate: Gate) -> str:
    """Return a warning if the threshold of a gate was not chosen by its effect on accuracy.

    Returns:
        The warning. '' if the threshold is calibrated, if the gate is not fitted, or if it decides by its raw score
        (verdict 'own'), for which thresholds are not calibrated.
    """
    if not isinstance(gate, FittedGate) or gate.verdict == "own" or gate.artifact.manifest.get("calibrated", True):
        return ""
    return (
        f"The threshold of the gate '{gate.artifact.path.name}' is not calibrated: its label runs have no answers with "
        "passages, so it is unknown what skipping a search loses. Choose one with `knowgate calibrate`."
    )


def find_violated_conditions(gate: Gate, deployment: Deployment) -> list[str]:
    """List the reasons why a gate's guarantee does not hold in a deployment.

    A guarantee limits the accuracy that is lost against always retrieving.
    """
    guarantee = _get_guarantee(gate)
    if guarantee is None or not isinstance(gate, FittedGate):
        return []
    violations = list(_check_threshold(gate, deployment, guarantee))
    # If the gate always retrieves and no arbiter changes answers, nothing can be lost, whatever the setup.
    cannot_lose = gate.threshold == ALWAYS_RETRIEVE and not guarantee.get("arbiter")
    if deployment.retriever is not None and not cannot_lose:
        violations += _check_passages(deployment, guarantee)
        violations += _check_arbiter(deployment, guarantee.get("arbiter"))
        violations += _check_reranker(deployment, guarantee.get("reranker"))
        if deployment.filters_passages:
            violations.append("it was proven without a second look at the passages")
    return violations


def get_proven_loss(gate: Gate, deployment: Deployment) -> float | None:
    """Return the proven maximum loss of accuracy against always retrieving.

    Returns:
        The maximum loss, such as 0.02. None if the gate has no guarantee, if the guarantee does not hold in this
        deployment, or if this cannot be checked, because the gate was fitted on imported answers.
    """
    guarantee = _get_guarantee(gate)
    if guarantee is None or is_fitted_on_recorded(gate) or find_violated_conditions(gate, deployment):
        return None
    return float(guarantee["epsilon"])


def has_guarantee_without_arbiter(gate: Gate) -> bool:
    """Return whether a gate has a guarantee proven without an arbiter.

    An arbiter picks one of two answers after retrieval.
    """
    guarantee = _get_guarantee(gate)
    return guarantee is not None and guarantee.get("arbiter") is None


def _get_guarantee(gate: Gate) -> Mapping[str, Any] | None:
    """Return the guarantee of a gate with its evidence, or None.

    A gate that decides by its scores before calibration (`verdict` is "own") has no guarantee.
    """
    if not isinstance(gate, FittedGate) or gate.verdict == "own":
        return None
    return cast(Mapping[str, Any] | None, gate.artifact.manifest.get("guarantee"))


def _check_threshold(gate: FittedGate, deployment: Deployment, guarantee: Mapping[str, Any]) -> Iterator[str]:
    """Yield reasons why the guarantee fails with the current LLM, prompts or threshold."""
    if gate.note:  # only gates that are used with a different LLM or different prompts have a note
        yield "the gate was fitted on another LLM or other prompts"
    threshold = deployment.threshold
    if threshold in (None, gate.threshold):
        return
    if threshold > gate.threshold:  # a lower threshold retrieves more, so that it harms fewer answers
        yield f"the threshold used is {threshold:g}"
    # But at a lower threshold, the net loss (harmed minus gained answers) may be larger, unless it was tested, too.
    is_tested = round(threshold, 3) == threshold  # the tested thresholds have up to three decimals
    if guarantee.get("form") == "net" and not is_tested:
        yield f"the threshold used, {threshold}, was not tested"


def _check_passages(deployment: Deployment, guarantee: Mapping[str, Any]) -> Iterator[str]:
    """Yield reasons why the guarantee fails with this retriever, passages or answer settings."""
    retriever = guarantee["retriever"]
    if _differ(retriever["fingerprint"], deployment.retriever):
        yield f"it was proven for passages of another index ({retriever['name']})"
    k = count_shown_passages(guarantee["k"], retriever["fingerprint"])  # None if each question had its own passages
    if k not in (None, deployment.k):
        yield f"it was proven for {k} passages, not for {deployment.k}"
    max_tokens = guarantee.get("max_tokens")
    if _differ(max_tokens, deployment.max_tokens):
        yield f"it was proven for answers of up to {max_tokens} tokens, not {deployment.max_tokens}"
    if _differ(guarantee.get("open_prompts"), deployment.open_prompts):
        yield "it was proven for other prompts with passages"


def _check_arbiter(deployment: Deployment, arbiter: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the reason why the guarantee fails with the arbiter in use, if any.

    Args:
        deployment: The setup in which the gate is used.
        arbiter: Name and fingerprint of the arbiter that the guarantee was proven with; None if without one.
    """
    if arbiter is None:
        if deployment.arbiter is not None:
            yield "it was proven without an arbiter"
    elif deployment.arbiter is None:
        yield f"it was proven with the arbiter '{arbiter['name']}'"
    elif deployment.arbiter != arbiter["fingerprint"]:
        yield f"it was proven with the arbiter '{arbiter['name']}', fitted differently"


def _check_reranker(deployment: Deployment, reranker: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the reason why the guarantee fails with the reranker in use, if any.

    Args:
        deployment: The setup in which the gate is used.
        reranker: The reranker that the guarantee was proven with; None if without one.
    """
    if reranker is None:
        if deployment.reranker is not None:
            yield "it was proven without reranking"
    elif deployment.reranker != reranker["fingerprint"]:
        used = "not by this one" if deployment.reranker else "but none is used here"
        yield f"it was proven for passages chosen by the reranker {reranker['name']}, {used}"
    elif _differ(reranker.get("candidates"), deployment.candidates):
        yield f"it was proven for passages chosen from {reranker['candidates']} candidates, not {deployment.candidates}"
    elif deployment.reranks_sometimes:
        yield "it was proven for passages that were always reranked"


def _differ(proven: object, used: object) -> bool:
    """Return whether two values differ. A value that is None is unknown and does not count as different."""
    return proven is not None and used is not None and proven != used
