"""A threshold and what speaks for it, written into a fitted gate: `gate.json`, the card, the questions it rests on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from knowgate.core.display import TextTable
from knowgate.data.runs.caveats import describe_synthetic
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, CARD_FILE, Artifact, revise_artifact
from knowgate.gates.calibration.threshold_choice import ThresholdResult
from knowgate.stats.proportions import wilson_interval

TargetKind = Literal["guarantee", "budget", "accuracy"]
TARGET_KINDS: tuple[TargetKind, ...] = ("guarantee", "budget", "accuracy")
CALIBRATION_KEYS_FILE = "calibrated.txt"  # keys of the questions the threshold was chosen on, as those of seen.txt
CARD_SECTION = re.compile(r"\n## Threshold\n.*?(?=\n## |\Z)", flags=re.DOTALL)


def save_threshold(
    artifact: Artifact, threshold: float, kind: TargetKind, evidence: Mapping[str, Any], keys: Sequence[str], out: Path
) -> None:
    """Replace the gate's threshold, and with it the evidence for an earlier one."""
    kept = {key: value for key, value in artifact.manifest.items() if key not in TARGET_KINDS}
    manifest = {**kept, "threshold": threshold, kind: dict(evidence)}
    file = artifact.path / CARD_FILE
    card = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    section = render_card_section(threshold, kind, evidence)
    texts = {CARD_FILE: replace_card_section(card, section), CALIBRATION_KEYS_FILE: "\n".join(sorted(set(keys))) + "\n"}
    revise_artifact(artifact, manifest, texts, out)


def replace_card_section(card: str, section: str) -> str:
    """The card with this section on the threshold, in the place of an earlier one."""
    return CARD_SECTION.sub("", card.rstrip()).rstrip() + f"\n\n{section}\n"


def render_card_section(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Markdown: the sentence, where it holds, and what was counted."""
    where = (
        f"Chosen on {evidence['created']} for {evidence['model']['name']}, prompts {evidence['prompts']}, passages "
        f"from {evidence['retriever']['name']} ({evidence['retriever']['fingerprint'] or 'no fingerprint'})"
        f"{_chosen_by(evidence)}{_amounts(evidence)}{_arbiter(evidence)}, graded by {evidence['grader']}; label runs: "
        f"{', '.join(evidence['runs'])}."
    )
    parts = [f"## Threshold\n\n{summarize_threshold(threshold, kind, evidence)}", where, _table(evidence)]
    return "\n\n".join(parts)


def _chosen_by(evidence: Mapping[str, Any]) -> str:
    reranker = evidence.get("reranker")
    return f", chosen by the reranker {reranker['name']} ({reranker['fingerprint']})" if reranker else ""


def _amounts(evidence: Mapping[str, Any]) -> str:
    """How many passages, and how long an answer; what an older gate does not know is left out."""
    shown = f", {evidence['k']} at a time" if evidence.get("k") else ""
    return shown + (f", answers of up to {evidence['max_tokens']} tokens" if evidence.get("max_tokens") else "")


def _arbiter(evidence: Mapping[str, Any]) -> str:
    """Who chooses after retrieval."""
    weighed = evidence.get("arbiter")
    return f", with the arbiter {weighed['name']} ({weighed['fingerprint']})" if weighed else ""


def summarize_threshold(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """What the threshold is good for, in words; and that nobody ever asked the questions, where an LLM wrote them."""
    synthetic = describe_synthetic(evidence.get("synthetic") or 0, _counted(evidence))
    return " ".join([_good_for(threshold, kind, evidence), *([synthetic] if synthetic else [])])


def _counted(evidence: Mapping[str, Any]) -> int:
    """Questions that had a part in it: chosen on, and held out."""
    return sum(int(part["n"]) for part in (evidence.get("chosen_on"), evidence.get("held_out")) if part)


def _good_for(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    if kind == "guarantee":
        return _not_proven(evidence) if threshold == ALWAYS_RETRIEVE else _proven(threshold, evidence)
    shown = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"threshold {threshold:g}"
    if kind == "budget":
        return f"For a retrieval rate of {_percent(evidence['wanted'])}: {shown}.{_missed(evidence)}"
    return f"For the best accuracy: {shown}."


def _loss(evidence: Mapping[str, Any]) -> str:
    """How much is lost at most, and how sure that is."""
    net = ", net of answers gained," if evidence.get("form") == "net" else ""
    return f"at most {_percent(evidence['epsilon'])}{net} with {_percent(1 - evidence['delta'])} confidence"


def _proven(threshold: float, evidence: Mapping[str, Any]) -> str:
    net, weighed = evidence.get("form") == "net", evidence.get("arbiter")
    kind = "lost" if net else "harmed" if weighed else "harmed skips"
    counted = f"{evidence['harmed']} {kind}" + (f" and {evidence['gained']} gained" if net else "")
    with_whom = f" with the arbiter {weighed['name']}" if weighed else ""
    return (
        f"Threshold {threshold:g}{with_whom} loses at most {_percent(evidence['epsilon'])} of the answers"
        f"{', net of those gained,' if net else ''} against always retrieving, with {_percent(1 - evidence['delta'])} "
        f"confidence ({counted} among {evidence['n']} questions, p = {evidence['p_value']:.2g})."
    )


def _not_proven(evidence: Mapping[str, Any]) -> str:
    if weighed := evidence.get("arbiter"):
        if not evidence.get("proven", True):
            return (
                f"With the arbiter {weighed['name']} not even always retrieving is proven to lose {_loss(evidence)} "
                f"({evidence['harmed']} harmed among {evidence['n']} questions). Allow more, use another arbiter or "
                "--arbiter none, or count answers gained: --net."
            )
        return (
            f"Always retrieving with the arbiter {weighed['name']} loses {_loss(evidence)}; no skipping is proven to."
        )
    return f"No threshold is proven to lose {_loss(evidence)}: always retrieve."


def _missed(evidence: Mapping[str, Any]) -> str:
    """Equal needs cannot be told apart: all of them are retrieved for or none, so less of a budget may be used."""
    counts = evidence.get("chosen_on") or {}
    if not counts or (evidence["wanted"] - counts["rate"]) * counts["n"] < 1:
        return ""
    return (
        f" It retrieves for {_percent(counts['rate'])} of the questions it was chosen on: needs are tied there, and "
        "the next lower threshold would go beyond the budget."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _table(evidence: Mapping[str, Any]) -> str:
    lines = ["| questions | n | retrieved | accuracy | always | never | lost | harmed skips |", "|---|" + "---|" * 7]
    for name, title in (("chosen_on", "chosen on"), ("held_out", "held out")):
        if counts := evidence.get(name):
            always, never = counts["right_always"] / counts["n"], counts["right_never"] / counts["n"]
            lines.append(
                f"| {title} | {counts['n']} | {counts['rate']:.1%} | {counts['accuracy']:.1%} | {always:.1%} "
                f"| {never:.1%} | {counts['loss']:+.1%} | {counts['harmed']} |"
            )
    return "\n".join(lines)


def build_calibration_table(threshold: float, chosen: ThresholdResult, held: ThresholdResult | None) -> TextTable:
    """Shares with their 95 % intervals (Wilson)."""
    columns = [chosen, *([held] if held else [])]
    shown = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"{threshold:g}"
    rows = [("threshold", *(shown for _ in columns))]
    cells = {**CALIBRATION_CELLS, **(HARMED_CELLS if chosen.right_chosen is None else ARBITER_CELLS)}
    rows += [(title, *(cell(one) for one in columns)) for title, cell in cells.items()]
    return TextTable("Threshold", ("", "chosen on", "held out")[: len(columns) + 1], tuple(rows))


def _share(hits: int, n: int) -> str:
    low, high = wilson_interval(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"


CALIBRATION_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "questions": lambda one: str(one.n),
    "retrieval rate": lambda one: _share(one.retrieved, one.n),
    "accuracy": lambda one: _share(one.right, one.n),
    "accuracy, always": lambda one: _share(one.right_always, one.n),
    "accuracy, never": lambda one: _share(one.right_never, one.n),
    "lost against always": lambda one: f"{one.loss:+.1%}",
}
HARMED_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "harmed skips": lambda one: f"{one.harmed}: {_share(one.harmed, one.n)}",
}
ARBITER_CELLS: dict[str, Callable[[ThresholdResult], str]] = {
    "accuracy, always and then the arbiter": lambda one: _share(one.right_chosen or 0, one.n),
    "harmed": HARMED_CELLS["harmed skips"],
    "gained": lambda one: f"{one.gained}: {_share(one.gained, one.n)}",
}
