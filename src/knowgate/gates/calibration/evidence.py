"""The evidence for a gate's threshold: how it was chosen, on which questions, and what it does to them.

It is stored in `gate.json`, described in the model card and in one sentence, and shown as a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
        evidence: How the threshold was chosen, and the setup that it is valid for (the fields of `EvidenceRecord`).
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
    summary = summarize_threshold(threshold, kind, evidence)
    if changed := evidence.get("changed"):
        confidence = _format_percent(1 - changed["delta"])
        summary += (
            f" It changes at most {_format_percent(changed['bound'])} of the answers, right or wrong, with {confidence} "
            f"confidence ({changed['changed']} of {changed['n']} held-out questions)."
        )
    return "\n\n".join([f"## Threshold\n\n{summary}", _describe_setup(evidence), _render_counts(evidence)])


def _describe_setup(evidence: Mapping[str, Any]) -> str:
    """Describe the setup that a threshold is valid for in one sentence: LLM, prompts, passages, arbiter, grader."""
    action = "Tested" if evidence.get("test_only") else "Chosen"
    retriever = evidence["retriever"]
    parts = [
        f"{action} on {evidence['created']} for {evidence['model']['name']}",
        f"prompts {evidence['prompts']}",
        f"passages from {retriever['name']} ({retriever['fingerprint'] or 'no fingerprint'})",
    ]
    if reranker := evidence.get("reranker"):
        parts.append(f"chosen by the reranker {reranker['name']} ({reranker['fingerprint']})")
    if k := evidence.get("k"):
        parts.append(f"{k} at a time")
    if max_tokens := evidence.get("max_tokens"):
        parts.append(f"answers of up to {max_tokens} tokens")
    if arbiter := evidence.get("arbiter"):
        parts.append(f"with the arbiter {arbiter['name']} ({arbiter['fingerprint']})")
    return ", ".join([*parts, f"graded by {evidence['grader']}; label runs: {', '.join(evidence['runs'])}."])


def _render_counts(evidence: Mapping[str, Any]) -> str:
    """Render a Markdown table of the results on the questions that the threshold was chosen on and tested on.

    'always' and 'never' are the accuracies of always and never retrieving. 'harmed skips' counts the questions that only
    always retrieving answers correctly.
    """
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
    """Say in a sentence what a threshold achieves, with a caveat if an LLM wrote some of the questions.

    Args:
        threshold: The threshold.
        kind: What it was chosen for: 'guarantee', 'budget' or 'accuracy'.
        evidence: How it was chosen, as stored in `gate.json`.
    """
    n = sum(int(counts["n"]) for counts in (evidence.get("chosen_on"), evidence.get("held_out")) if counts)
    caveat = describe_synthetic(evidence.get("synthetic") or 0, n)
    summary = _summarize_choice(threshold, kind, evidence)
    return f"{summary} {caveat}" if caveat else summary


def _summarize_choice(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Say in a sentence what a threshold achieves, depending on what it was chosen for (`kind`)."""
    if kind == "guarantee":
        return _summarize_failure(evidence) if threshold == ALWAYS_RETRIEVE else _summarize_proof(threshold, evidence)
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"threshold {threshold:g}"
    if kind == "budget":
        rate = _format_percent(evidence["wanted"])
        return f"For a retrieval rate of {rate}: {rule}.{_explain_unused_budget(evidence)}"
    return f"For the best accuracy: {rule}."


def _summarize_proof(threshold: float, evidence: Mapping[str, Any]) -> str:
    """Say how many right answers a threshold loses at most against always retrieving, or that nothing is proven.

    `harmed` counts the questions that only always retrieving answers correctly, `gained` those that only the threshold
    answers correctly. A guarantee of the form 'net' bounds harmed minus gained, any other one bounds harmed.
    """
    arbiter, is_net, harmed = evidence.get("arbiter"), evidence.get("form") == "net", evidence["harmed"]
    net = ", net of those gained," if is_net else ""
    counts = f"{harmed} harmed" if arbiter else f"{harmed} harmed skips"  # without an arbiter, only skipping can harm
    if is_net:
        counts = f"{harmed} lost and {evidence['gained']} gained"
    with_arbiter = f" with the arbiter {arbiter['name']}" if arbiter else ""
    loss, confidence = _format_percent(evidence["epsilon"]), _format_percent(1 - evidence["delta"])
    if not evidence.get("proven", True):
        return f"Threshold {threshold:g}{with_arbiter} has no guarantee ({counts} among {evidence['n']} questions)."
    return (
        f"Threshold {threshold:g}{with_arbiter} loses at most {loss} of the answers{net} against always retrieving, "
        f"with {confidence} confidence ({counts} among {evidence['n']} questions, p = {evidence['p_value']:.2g})."
    )


def _summarize_failure(evidence: Mapping[str, Any]) -> str:
    """Say what is proven if the guarantee could not be shown for any threshold that skips questions.

    Even without skips, an arbiter can lose answers: after the search, it may choose a wrong answer without passages.
    """
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
            f"Always retrieving with the arbiter {arbiter['name']} loses {loss}. No threshold that skips searches is "
            "proven to lose so little."
        )
    return (
        f"With the arbiter {arbiter['name']}, even always retrieving is not proven to lose {loss} "
        f"({evidence['harmed']} harmed among {evidence['n']} questions). Allow a higher `max_loss`, use another "
        "arbiter or none, or count gained answers with net=True."
    )


def _explain_unused_budget(evidence: Mapping[str, Any]) -> str:
    """Explain why a threshold retrieves for fewer questions than the budget allows; '' if the budget is used up.

    Questions with equal needs are all retrieved for or all skipped, so that some rates cannot be reached.
    """
    counts = evidence.get("chosen_on") or {}
    if not counts or (evidence["wanted"] - counts["rate"]) * counts["n"] < 1:  # not even one question is missing
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
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"{threshold:g}"
    columns = [_make_cells(result) for result in (chosen, held_out) if result is not None]
    rows = [("threshold", *(rule for _ in columns))]
    rows += [(title, *(cells[title] for cells in columns)) for title in columns[0]]
    return TextTable("Threshold", ("", "chosen on", "held out")[: len(columns) + 1], tuple(rows))


def _make_cells(result: ThresholdResult) -> dict[str, str]:
    """Return the cells of one column of the table, by the title of their row."""
    harmed = f"{result.harmed}: {_format_share(result.harmed, result.n)}"
    cells = {
        "questions": str(result.n),
        "retrieval rate": _format_share(result.retrieved, result.n),
        "accuracy": _format_share(result.right, result.n),
        "accuracy, always": _format_share(result.right_always, result.n),
        "accuracy, never": _format_share(result.right_never, result.n),
        "lost against always": f"{result.loss:+.1%}",
    }
    if result.right_chosen is None:  # without an arbiter, only skipping can lose a right answer
        return {**cells, "harmed skips": harmed}
    return {
        **cells,
        "accuracy, always and then the arbiter": _format_share(result.right_chosen, result.n),
        "harmed": harmed,
        "gained": f"{result.gained}: {_format_share(result.gained, result.n)}",
    }


def _format_share(hits: int, n: int) -> str:
    """Format a share with its Wilson interval."""
    low, high = wilson_interval(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"
