"""The evidence for a gate's threshold: how it was chosen, on which questions, and what it does to them.

It is stored in `gate.json`, described in the model card and in one sentence, and shown as a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from knowgate.core.display import TextTable
from knowgate.data.runs.columns import describe_synthetic
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, CARD_FILE, Artifact, revise_artifact
from knowgate.gates.calibration.threshold_choice import ThresholdResult
from knowgate.stats.proportions import wilson_interval

TargetKind = Literal["guarantee", "budget", "accuracy"]
TARGET_KINDS: tuple[TargetKind, ...] = ("guarantee", "budget", "accuracy")
CALIBRATION_KEYS_FILE = "calibrated.txt"  # keys of the questions that the threshold was chosen on
CARD_SECTION = re.compile(r"\n## Threshold\n.*?(?=\n## |\Z)", flags=re.DOTALL)


def save_threshold(
    artifact: Artifact, threshold: float, kind: TargetKind, evidence: Mapping[str, Any], keys: Sequence[str], out: Path
) -> None:
    """Write a threshold and its evidence into the folder of a fitted gate, replacing an earlier threshold.

    Args:
        artifact: The fitted gate.
        threshold: The new threshold.
        kind: What the threshold was chosen for: 'guarantee', 'budget' or 'accuracy'.
        evidence: The evidence; see `EvidenceRecord`.
        keys: Fingerprints of the questions that the threshold was chosen on.
        out: Folder to write; may be the folder of the gate itself.
    """
    # An earlier threshold has its evidence under 'guarantee', 'budget' or 'accuracy'.
    unchanged = {key: value for key, value in artifact.manifest.items() if key not in TARGET_KINDS}
    manifest = {**unchanged, "threshold": threshold, "calibrated": True, kind: dict(evidence)}
    file = artifact.path / CARD_FILE
    card = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    texts = {
        CARD_FILE: replace_card_section(card, render_card_section(threshold, kind, evidence)),
        CALIBRATION_KEYS_FILE: "\n".join(sorted(set(keys))) + "\n",
    }
    revise_artifact(artifact, manifest, texts, out)


def replace_card_section(card: str, section: str) -> str:
    """Remove the section about the threshold from a model card, if it has one, and append a new one."""
    return CARD_SECTION.sub("", card.rstrip()).rstrip() + f"\n\n{section}\n"


def render_card_section(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Render the model card's section about the threshold: a summary, the setup it is valid for, and counts."""
    retriever, reranker, arbiter = evidence["retriever"], evidence.get("reranker"), evidence.get("arbiter")
    setup = [
        f"{'Tested' if evidence.get('test_only') else 'Chosen'} on {evidence['created']} for {evidence['model']['name']}",
        f"prompts {evidence['prompts']}",
        f"passages from {retriever['name']} ({retriever['fingerprint'] or 'no fingerprint'})",
        f"chosen by the reranker {reranker['name']} ({reranker['fingerprint']})" if reranker else "",
        f"{evidence['k']} at a time" if evidence.get("k") else "",
        f"answers of up to {evidence['max_tokens']} tokens" if evidence.get("max_tokens") else "",
        f"with the arbiter {arbiter['name']} ({arbiter['fingerprint']})" if arbiter else "",
        f"graded by {evidence['grader']}; label runs: {', '.join(evidence['runs'])}.",
    ]
    summary = summarize_threshold(threshold, kind, evidence)
    if changed := evidence.get("changed"):
        confidence = _format_percent(1 - changed["delta"])
        summary += (
            f" It changes at most {_format_percent(changed['bound'])} of the answers, right or wrong, with {confidence} "
            f"confidence ({changed['changed']} of {changed['n']} held-out questions)."
        )
    return "\n\n".join([f"## Threshold\n\n{summary}", ", ".join(filter(None, setup)), _render_counts(evidence)])


def _render_counts(evidence: Mapping[str, Any]) -> str:
    """Render a Markdown table of the results on the questions that the threshold was chosen on and tested on."""
    lines = ["| questions | n | retrieved | accuracy | always | never | lost | harmed skips |", "|---|" + "---|" * 7]
    first_title = "test questions" if evidence.get("test_only") else "chosen on"
    for name, title in (("chosen_on", first_title), ("held_out", "held out")):
        if counts := evidence.get(name):
            always, never = counts["right_always"] / counts["n"], counts["right_never"] / counts["n"]
            lines.append(
                f"| {title} | {counts['n']} | {counts['rate']:.1%} | {counts['accuracy']:.1%} | {always:.1%} "
                f"| {never:.1%} | {counts['loss']:+.1%} | {counts['harmed']} |"
            )
    return "\n".join(lines)


def summarize_threshold(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Say in a sentence what a threshold achieves, with a caveat if an LLM wrote some of the questions."""
    n = sum(int(counts["n"]) for counts in (evidence.get("chosen_on"), evidence.get("held_out")) if counts)
    caveat = describe_synthetic(evidence.get("synthetic") or 0, n)
    summary = _summarize_choice(threshold, kind, evidence)
    return f"{summary} {caveat}" if caveat else summary


def _summarize_choice(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Say in a sentence what a threshold achieves."""
    if kind == "guarantee":
        return _summarize_failure(evidence) if threshold == ALWAYS_RETRIEVE else _summarize_proof(threshold, evidence)
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"threshold {threshold:g}"
    if kind == "budget":
        rate = _format_percent(evidence["wanted"])
        return f"For a retrieval rate of {rate}: {rule}.{_explain_unused_budget(evidence)}"
    return f"For the best accuracy: {rule}."


def _summarize_proof(threshold: float, evidence: Mapping[str, Any]) -> str:
    """Say how much accuracy a threshold with a guarantee loses at most."""
    is_net, arbiter = evidence.get("form") == "net", evidence.get("arbiter")
    if is_net:
        counts = f"{evidence['harmed']} lost and {evidence['gained']} gained"
    else:
        counts = f"{evidence['harmed']} {'harmed' if arbiter else 'harmed skips'}"
    with_arbiter = f" with the arbiter {arbiter['name']}" if arbiter else ""
    loss, confidence = _format_percent(evidence["epsilon"]), _format_percent(1 - evidence["delta"])
    return (
        f"Threshold {threshold:g}{with_arbiter} loses at most {loss} of the answers"
        f"{', net of those gained,' if is_net else ''} against always retrieving, with {confidence} confidence "
        f"({counts} among {evidence['n']} questions, p = {evidence['p_value']:.2g})."
    )


def _summarize_failure(evidence: Mapping[str, Any]) -> str:
    """Say what is proven if the guarantee could not be shown for any threshold that skips questions."""
    net = ", net of answers gained," if evidence.get("form") == "net" else ""
    confidence = _format_percent(1 - evidence["delta"])
    loss = f"at most {_format_percent(evidence['epsilon'])}{net} with {confidence} confidence"
    arbiter = evidence.get("arbiter")
    if not arbiter and evidence.get("test_only"):
        return "The policy is to always retrieve, so nothing is lost against always retrieving."
    if not arbiter:
        return f"No threshold is proven to lose {loss}: always retrieve."
    if evidence.get("proven", True):
        return (
            f"Always retrieving with the arbiter {arbiter['name']} loses {loss}. This is not proven for any threshold "
            "that skips questions."
        )
    return (
        f"With the arbiter {arbiter['name']} not even always retrieving is proven to lose {loss} ({evidence['harmed']} "
        f"harmed among {evidence['n']} questions). Allow a higher `max_loss`, use another arbiter or none, or count "
        "gained answers with net=True."
    )


def _explain_unused_budget(evidence: Mapping[str, Any]) -> str:
    """Explain why a threshold retrieves for fewer questions than the budget allows; '' if it does not.

    Questions with equal needs are on the same side of every threshold, so that some rates cannot be reached.
    """
    counts = evidence.get("chosen_on") or {}
    if not counts or (evidence["wanted"] - counts["rate"]) * counts["n"] < 1:
        return ""
    return (
        f" It retrieves for only {_format_percent(counts['rate'])} of the questions it was chosen on. Several "
        "questions have the same need, so that the next lower threshold would exceed the budget."
    )


def _format_percent(share: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.4g} %"


# --- table ----------------------------------------------------------------------------------------


def build_calibration_table(threshold: float, chosen: ThresholdResult, held_out: ThresholdResult | None) -> TextTable:
    """Build a table of what a threshold does to the questions it was chosen on and to the held-out questions.

    Shares are shown with 95 % Wilson intervals.
    """
    results = [chosen, *([held_out] if held_out else [])]
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"{threshold:g}"
    cells = {**COMMON_CELLS, **(HARM_CELLS if chosen.right_chosen is None else ARBITER_CELLS)}
    rows = [("threshold", *(rule for _ in results))]
    rows += [(title, *(format_cell(result) for result in results)) for title, format_cell in cells.items()]
    return TextTable("Threshold", ("", "chosen on", "held out")[: len(results) + 1], tuple(rows))


def _format_share(hits: int, n: int) -> str:
    """Format a share with its Wilson interval."""
    low, high = wilson_interval(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"


COMMON_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "questions": lambda result: str(result.n),
    "retrieval rate": lambda result: _format_share(result.retrieved, result.n),
    "accuracy": lambda result: _format_share(result.right, result.n),
    "accuracy, always": lambda result: _format_share(result.right_always, result.n),
    "accuracy, never": lambda result: _format_share(result.right_never, result.n),
    "lost against always": lambda result: f"{result.loss:+.1%}",
}
HARM_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "harmed skips": lambda result: f"{result.harmed}: {_format_share(result.harmed, result.n)}"
}
ARBITER_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "accuracy, always and then the arbiter": lambda result: _format_share(result.right_chosen or 0, result.n),
    "harmed": HARM_CELLS["harmed skips"],
    "gained": lambda result: f"{result.gained}: {_format_share(result.gained, result.n)}",
}
