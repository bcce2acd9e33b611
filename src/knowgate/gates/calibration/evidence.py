"""The evidence for a gate's threshold: how it was chosen, on which questions, and what it does to them.

It is stored in `gate.json`, described in the model card and in one sentence, and shown as a table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text
from knowgate.data.runs.columns import describe_synthetic
from knowgate.data.runs.table import LabelTable
from knowgate.gates.arbiters.abstention import answers_differ
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, CARD_FILE, Artifact, revise_artifact
from knowgate.gates.calibration.threshold_choice import GateOutcomes, ThresholdResult
from knowgate.labels.options import count_shown_passages
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import upper_confidence_limit, wilson_interval

TargetKind = Literal["guarantee", "budget", "accuracy"]
TARGET_KINDS: tuple[TargetKind, ...] = ("guarantee", "budget", "accuracy")
CALIBRATION_KEYS_FILE = "calibrated.txt"  # keys of the questions that the threshold was chosen on
CARD_SECTION = re.compile(r"\n## Threshold\n.*?(?=\n## |\Z)", flags=re.DOTALL)


def save_threshold(
    artifact: Artifact, threshold: float, kind: TargetKind, evidence: Mapping[str, Any], keys: Sequence[str], out: Path
) -> None:
    """Write a threshold and its evidence into the folder of a fitted gate.

    Args:
        artifact: The fitted gate.
        threshold: The new threshold.
        kind: What the threshold was chosen for: 'guarantee', 'budget' or 'accuracy'.
        evidence: How the threshold was chosen, and the setup that it is valid for (the fields of `EvidenceRecord`).
        keys: Fingerprints of the questions that the threshold was chosen on.
        out: Folder to write; may be the folder of the gate itself.
    """
    # Drop the evidence of an earlier threshold, which is stored under 'guarantee', 'budget' or 'accuracy'.
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
    """Render the model card's section about the threshold."""
    summary = summarize_threshold(threshold, kind, evidence)
    if changed := evidence.get("changed"):
        confidence = _format_percent(1 - changed["delta"])
        summary += (
            f" It changes at most {_format_percent(changed['bound'])} of the answers, right or wrong, with {confidence} "
            f"confidence ({changed['changed']} of {changed['n']} held-out questions)."
        )
    return "\n\n".join([f"## Threshold\n\n{summary}", _describe_setup(evidence), _render_counts(evidence)])


def _describe_setup(evidence: Mapping[str, Any]) -> str:
    """Describe the setup of a threshold in one sentence: LLM, prompts, passages, arbiter, grader."""
    action = "Tested" if evidence.get("test_only") else "Chosen"
    parts = [
        f"{action} on {evidence['created']} for {evidence['model']['name']}",
        f"prompts {evidence['prompts']}",
        *_describe_passages(evidence),
    ]
    if max_tokens := evidence.get("max_tokens"):
        parts.append(f"answers of up to {max_tokens} tokens")
    if arbiter := evidence.get("arbiter"):
        parts.append(f"with the arbiter {arbiter['name']} ({arbiter['fingerprint']})")
    parts.append(f"graded by {evidence['grader']}; label runs: {', '.join(evidence['runs'])}.")
    return ", ".join(parts)


def _describe_passages(evidence: Mapping[str, Any]) -> list[str]:
    """Describe where passages come from, who chooses them, and how many are shown."""
    retriever = evidence["retriever"]
    parts = [f"passages from {retriever['name']} ({retriever['fingerprint'] or 'no fingerprint'})"]
    if reranker := evidence.get("reranker"):
        parts.append(f"chosen by the reranker {reranker['name']} ({reranker['fingerprint']})")
    if k := evidence.get("k"):
        parts.append(f"{k} at a time")
    return parts


def _render_counts(evidence: Mapping[str, Any]) -> str:
    """Render a Markdown table of a threshold's results, compared with always and never retrieving.

    'lost' is the difference in accuracy to always retrieving. 'harmed skips' counts the questions that are answered
    right with always retrieving, but wrong with the threshold.
    """
    lines = ["| questions | n | retrieved | accuracy | always | never | lost | harmed skips |", "|---|" + "---|" * 7]
    chosen_on_title = "test questions" if evidence.get("test_only") else "chosen on"
    for name, title in (("chosen_on", chosen_on_title), ("held_out", "held out")):
        if counts := evidence.get(name):
            always, never = counts["right_always"] / counts["n"], counts["right_never"] / counts["n"]
            lines.append(
                f"| {title} | {counts['n']} | {counts['rate']:.1%} | {counts['accuracy']:.1%} | {always:.1%} "
                f"| {never:.1%} | {counts['loss']:+.1%} | {counts['harmed']} |"
            )
    return "\n".join(lines)


def summarize_threshold(threshold: float, kind: TargetKind, evidence: Mapping[str, Any]) -> str:
    """Say in a sentence what a threshold achieves. A caveat mentions questions written by an LLM.

    Args:
        threshold: The threshold.
        kind: What it was chosen for: a 'guarantee' on accuracy, a 'budget' of searches, or the best 'accuracy'.
        evidence: How it was chosen, as stored in `gate.json`.
    """
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"threshold {threshold:g}"
    if kind == "guarantee":
        summary = _summarize_guarantee(threshold, evidence)
    elif kind == "budget":
        summary = f"For a retrieval rate of {_format_percent(evidence['wanted'])}: {rule}."
    else:
        summary = f"For the best accuracy: {rule}."
    question_sets = [evidence.get("chosen_on"), evidence.get("held_out")]
    n_questions = sum(int(counts["n"]) for counts in question_sets if counts)
    caveat = describe_synthetic(evidence.get("synthetic") or 0, n_questions)
    return f"{summary} {caveat}" if caveat else summary


def _summarize_guarantee(threshold: float, evidence: Mapping[str, Any]) -> str:
    """Say how many right answers a threshold loses at most against always retrieving.

    Args:
        threshold: The threshold.
        evidence: The fields of `GuaranteeRecord`. `harmed` counts right answers that the gate loses, `gained` right
            answers that it gains. `test_only` means that the threshold was given, and not chosen on these questions.
    """
    loss = _format_percent(evidence["epsilon"])
    confidence = _format_percent(1 - evidence["delta"])
    if threshold == ALWAYS_RETRIEVE and not evidence.get("arbiter"):
        if evidence.get("test_only"):
            return "The policy is to always retrieve, so nothing is lost against always retrieving."
        return f"No threshold is proven to lose at most {loss} with {confidence} confidence: always retrieve."
    rule = _name_rule(threshold, evidence.get("arbiter"))
    counts = f"{evidence['harmed']} lost, {evidence.get('gained', 0)} gained among {evidence['n']} questions"
    if not evidence.get("proven", True):
        return f"{rule} has no guarantee ({counts})."
    net = ", net of those gained," if evidence.get("form") == "net" else ""
    return (
        f"{rule} loses at most {loss} of the answers{net} against always retrieving, with {confidence} confidence "
        f"({counts}, p = {evidence['p_value']:.2g})."
    )


def _name_rule(threshold: float, arbiter: Mapping[str, Any] | None) -> str:
    """Name a threshold and its arbiter, as the subject of a sentence."""
    rule = "Always retrieving" if threshold == ALWAYS_RETRIEVE else f"Threshold {threshold:g}"
    return f"{rule} with the arbiter {arbiter['name']}" if arbiter else rule


def _format_percent(share: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.4g} %"


# --- table ----------------------------------------------------------------------------------------


def build_calibration_table(threshold: float, chosen: ThresholdResult, held_out: ThresholdResult | None) -> TextTable:
    """Build a table of a gate's accuracy and retrieval rate at a threshold.

    Held-out questions get a column of their own.
    """
    rule = "always retrieve" if threshold == ALWAYS_RETRIEVE else f"{threshold:g}"
    results = {"chosen on": chosen, "held out": held_out}
    columns = {title: _make_cells(result) for title, result in results.items() if result is not None}
    rows = [("threshold", *(rule for _ in columns))]
    for row_title in columns["chosen on"]:
        rows.append((row_title, *(cells[row_title] for cells in columns.values())))
    return TextTable("Threshold", ("", *columns), tuple(rows))


def _make_cells(result: ThresholdResult) -> dict[str, str]:
    """Return one column of the result table, by row title.

    'harmed' and 'gained' compare the gate with always retrieving.
    """
    cells = {
        "questions": str(result.n),
        "retrieval rate": _format_share(result.retrieved, result.n),
        "accuracy": _format_share(result.right, result.n),
        "accuracy, always": _format_share(result.right_always, result.n),
        "accuracy, never": _format_share(result.right_never, result.n),
        "lost against always": f"{result.loss:+.1%}",
        "harmed": f"{result.harmed}: {_format_share(result.harmed, result.n)}",
        "gained": f"{result.gained}: {_format_share(result.gained, result.n)}",
    }
    if result.right_chosen is not None:
        cells["accuracy, always and then the arbiter"] = _format_share(result.right_chosen, result.n)
    return cells


def _format_share(hits: int, n: int) -> str:
    """Format a share with its Wilson interval."""
    low, high = wilson_interval(hits, n)
    return f"{hits / n:.1%} [{low:.1%}, {high:.1%}]"


def bound_changed_answers(
    table: LabelTable, is_skipped: BoolArray, choices: ArbiterChoices | None, is_held_out: BoolArray, delta: float
) -> dict[str, Any] | None:
    """Compute an upper bound on the share of answers that differ between a gate and always retrieving.

    Args:
        table: The label table.
        is_skipped: Whether the gate skips retrieval for each question.
        choices: For each question, which answer an arbiter picks after retrieval; None without an arbiter.
        is_held_out: Whether each question is held out.
        delta: Probability that a later audit gives a false alarm that the gate changes more answers than the bound. Half
            of it is spent here, as the probability that the bound is too low. The audit spends the other half.

    Returns:
        The fields of `ChangedAnswersRecord`. None if no question is held out, or if the label runs contain no texts of
        answers.
    """
    answers_closed_book = is_skipped if choices is None else is_skipped | choices.from_memory
    rows = [table.rows[index] for index in np.flatnonzero(answers_closed_book & is_held_out).tolist()]
    # The texts of both answers. Only a closed-book answer can differ from the answer of always retrieving.
    pairs = [(row.closed.text, row.open.text) for row in rows if row.closed is not None and row.open is not None]
    has_texts = any(closed_book or open_book for closed_book, open_book in pairs)
    n = int(is_held_out.sum())
    if not n or (pairs and not has_texts):
        return None
    n_changed = sum(answers_differ(closed_book, open_book) for closed_book, open_book in pairs)
    bound = upper_confidence_limit(n_changed, n, delta / 2)
    return {"n": n, "changed": n_changed, "bound": bound, "delta": delta / 2}


def describe_setup(table: LabelTable, outcomes: GateOutcomes, keys: Sequence[str]) -> dict[str, Any]:
    """Return the setup of a threshold (LLM, prompts, retriever) for `gate.json`.

    Args:
        table: Recorded answers, with the settings with which they were generated.
        outcomes: Grades of the questions that the threshold was chosen on.
        keys: Fingerprints of the questions that the threshold was chosen on.
    """
    settings = table.settings
    return {
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": {"name": settings.get("retriever"), "fingerprint": settings.get("retriever_fingerprint")},
        "k": count_shown_passages(settings.get("k"), settings.get("retriever_fingerprint")),
        "max_tokens": settings.get("max_tokens"),
        "open_prompts": settings.get("open_prompts"),
        "reranker": _describe_reranker(settings),
        "grader": ", ".join(sorted({row.grader for row in table.rows})),
        "runs": [Path(run).name for run in table.runs],
        "synthetic": int(table.is_synthetic.sum()),
        "data_hash": _hash_grades(outcomes, keys),
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _describe_reranker(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the reranker of label runs for `gate.json`, or None."""
    if not settings.get("reranker_fingerprint"):
        return None
    return {
        "name": settings["reranker"],
        "fingerprint": settings["reranker_fingerprint"],
        "candidates": settings.get("candidates"),
    }


def _hash_grades(outcomes: GateOutcomes, keys: Sequence[str]) -> str:
    """Compute a hash of the questions and their grades."""
    grades = sorted(zip(keys, outcomes.closed_book_right.tolist(), outcomes.open_book_right.tolist(), strict=True))
    lines = [f"{key} {closed_book_right} {open_book_right}" for key, closed_book_right, open_book_right in grades]
    return sha256_text(*lines)[:16]
