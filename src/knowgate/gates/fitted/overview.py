"""A fitted gate at a glance, from its manifest and folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.display import Sheet, as_image
from knowgate.statistics import Estimate

CURVE = "curve.svg"
CHOSEN_BY = {"guarantee": "guarantee", "budget": "retrieval rate", "accuracy": "accuracy"}  # what a calibration leaves


def gate_line(path: Path, manifest: Mapping[str, Any]) -> str:
    """Folder, LLM, how well it ranks, when it retrieves."""
    parts = [f"{path.name}: for {manifest['model']['name']}"]
    parts += [f"fitted on '{manifest['target']}'"] if "target" in manifest else []
    parts += [f"AUROC {auroc_shown(manifest)}"] if "metrics" in manifest else []
    return ", ".join([*parts, f"retrieves {rule_of(manifest)}"])


def gate_html(path: Path, manifest: Mapping[str, Any], note: str = "") -> str:
    """The facts of the card and the ROC curve on the test split."""
    file = path / CURVE
    drawn = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    curve = as_image(drawn, "ROC curve on the test split") if drawn else ""
    return gate_sheet(path, manifest, note).html() + curve


def gate_sheet(path: Path, manifest: Mapping[str, Any], note: str = "") -> Sheet:
    sizes = ", ".join(f"{name} {count}" for name, count in manifest.get("split", {}).items())
    facts = (
        ("LLM", str(manifest["model"]["name"])),
        ("fitted on", str(manifest.get("target", ""))),
        ("questions", sizes),
        ("label runs", ", ".join(str(item["run"]) for item in manifest.get("data", ()))),
        ("needs", ", ".join(manifest["needs"]) or "nothing of the LLM"),
        ("AUROC on the test split", auroc_shown(manifest) if "metrics" in manifest else ""),
        ("retrieves", rule_of(manifest)),
        ("note", note),
        ("folder", str(path)),
    )
    title = f"Gate {manifest['gate']}: {path.name}"
    return Sheet(title, ("", ""), tuple(fact for fact in facts if fact[1]))


def auroc_shown(manifest: Mapping[str, Any]) -> str:
    measured = manifest["metrics"].get("auroc") or {}
    return Estimate(measured.get("value"), measured.get("low"), measured.get("high")).shown()


def rule_of(manifest: Mapping[str, Any]) -> str:
    """When it retrieves, and what that threshold was chosen by."""
    chosen = next((word for kind, word in CHOSEN_BY.items() if kind in manifest), "")
    rule = retrieval_rule(float(manifest["threshold"]))
    return f"{rule} (chosen by {chosen})" if chosen else rule


def retrieval_rule(threshold: float) -> str:
    """When a gate with this threshold retrieves."""
    if threshold < 0:
        return "always"
    return f"when need is above {threshold:g}" if threshold < 1 else "never"
