"""The card of a fitted gate: a page people can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from knowgate.display import markdown_code, markdown_text
from knowgate.gates import retrieval_rule
from knowgate.runs import how_to_ask, synthetic_words

WORDS = {
    "auroc": "AUROC (ranks questions that need retrieval above those that do not; .5 is chance)",
    "auprc": "area under precision-recall",
    "accuracy": "accuracy of need above 0.5 as a verdict, whatever the gate's threshold",
    "ece": "expected calibration error (0 is perfect)",
    "brier": "Brier score (0 is perfect)",
}

MEANT = {
    "known": "the LLM does not know the answer",
    "benefit": "retrieval turns a wrong answer right",
    "agree": "the LLM says something else once it has passages",
}


def card(manifest: Mapping[str, Any], notes: Sequence[str], command: str) -> str:
    """Markdown with data, splits, measures with intervals, and how to use it."""
    parts = [
        f"# {manifest['gate']} gate for {markdown_text(manifest['model']['name'])}",
        f"A knowgate gate, fitted {manifest['created']}. Its need is a calibrated probability that "
        f"{MEANT[manifest['target']]}.",
        *_synthetic(manifest),
        f'```console\nknowgate ask --gate THIS_FOLDER{_model(manifest)} --docs FOLDER "a question"\n```',
        _facts(manifest),
        "## Measured on the held-out test split\n\n" + _metrics(manifest),
        *_sets(manifest),
        "![ROC curve on the test split](curve.svg)",
    ]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {markdown_text(note)}" for note in notes))
    if command:
        parts.append(f"## Made by\n\n```console\n{markdown_code(command)}\n```")
    return "\n\n".join(parts) + "\n"


def _model(manifest: Mapping[str, Any]) -> str:
    return how_to_ask(manifest["model"]["name"])


def _synthetic(manifest: Mapping[str, Any]) -> list[str]:
    """First of all: that nobody ever asked what it was fitted on."""
    words = synthetic_words(manifest.get("synthetic", 0), sum(manifest["split"].values()))
    return [f"**{words}**"] if words else []


def _sets(manifest: Mapping[str, Any]) -> list[str]:
    """What the pooled label runs come to one by one."""
    if "sets" not in manifest:
        return []
    how = "each run counted the same in the fit" if manifest["balanced"] else "every question counted the same"
    lines = [f"By label run ({how}):", "", "| run | n | positive | AUROC | 95 % interval |", "|---|---|---|---|---|"]
    for name, one in manifest["sets"].items():
        share = "" if one["base_rate"] is None else f"{one['base_rate']:.0%}"
        lines.append(f"| {markdown_text(name)} | {one['n']} | {share} | {' | '.join(_cells(one['auroc']))} |")
    return ["\n".join(lines)]


def _cells(estimate: Mapping[str, float | None]) -> tuple[str, str]:
    if estimate["value"] is None:
        return "not defined", ""
    interval = "" if estimate["low"] is None else f"{estimate['low']:.3f} to {estimate['high']:.3f}"
    return f"{estimate['value']:.3f}", interval


def _facts(manifest: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {count}" for name, count in manifest["split"].items())
    rows = [
        ("model", f"{manifest['model']['name']} ({manifest['model']['fingerprint']})"),
        ("prompts", manifest["prompts"]),
        ("label runs", ", ".join(item["run"] for item in manifest["data"])),
        ("graded by", manifest["grader"]),
        ("questions", f"{sizes}; {manifest['base_rate']:.0%} of them positive"),
        ("needs", ", ".join(manifest["needs"]) or "nothing of the LLM"),
        ("options", _options(manifest["options"])),
        ("calibration", manifest["calibration"]["kind"]),
        ("retrieves, as fitted", retrieval_rule(float(manifest["threshold"]))),
        ("kept beside it", "ten of the questions, with their hidden states" if manifest.get("reference") else ""),
    ]
    return "| | |\n|---|---|\n" + "\n".join(
        f"| {name} | {markdown_text(str(value))} |" for name, value in rows if value
    )


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if not isinstance(value, list))


def majority(manifest: Mapping[str, Any]) -> float:
    """How often the commoner verdict is right on the test split: what the accuracy of a verdict must beat."""
    share = manifest["base_rate"] if manifest.get("test_rate") is None else manifest["test_rate"]
    return max(float(share), 1 - float(share))


def _metrics(manifest: Mapping[str, Any]) -> str:
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, estimate in manifest["metrics"].items():
        lines.append(f"| {WORDS[name]} | {' | '.join(_cells(estimate))} |")
        if name == "accuracy":
            lines.append(f"| the same of the commoner verdict for every question | {majority(manifest):.3f} | |")
    return "\n".join(lines)
