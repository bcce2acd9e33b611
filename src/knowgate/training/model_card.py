"""Model cards and manifests: the parts that gates, arbiters and rerankers share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from knowgate.core.display import escape_markdown, escape_markdown_code
from knowgate.data.runs.table import LabelTable
from knowgate.data.splits import Split

EstimateRecord = Mapping[str, float | None]


def join_card(parts: Iterable[str], notes: Sequence[str] = (), command: str = "") -> str:
    """Join the sections of a model card, and add notes and the command."""
    sections = list(parts)
    if notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in notes))
    if command:
        sections.append(f"## Made by\n\n```console\n{escape_markdown_code(command)}\n```")
    return "\n\n".join(sections) + "\n"


def format_usage(**settings: str) -> str:
    """Format a Python example of a pipeline with these settings."""
    arguments = ", ".join(f'{name}="{value}"' for name, value in settings.items())
    return (
        f"```python\nimport knowgate as kg\n\nsettings = kg.load_settings({arguments})\n"
        'print(kg.build_pipeline(settings).answer("a question"))\n```'
    )


def format_facts(rows: Iterable[tuple[str, object]]) -> str:
    """Format a table of names and values. Rows without a value are left out."""
    lines = [f"| {name} | {escape_markdown(str(value))} |" for name, value in rows if value]
    return "| | |\n|---|---|\n" + "\n".join(lines)


def format_estimate_cells(estimate: EstimateRecord) -> str:
    """Format a value and its 95 % interval as two table cells."""
    if estimate["value"] is None:
        return "not defined | "
    interval = "" if estimate["low"] is None else f"{estimate['low']:.3f} to {estimate['high']:.3f}"
    return f"{estimate['value']:.3f} | {interval}"


def format_metrics(
    metrics: Mapping[str, EstimateRecord], names: Mapping[str, str], extra_rows: Mapping[str, str] | None = None
) -> str:
    """Format metrics with their intervals as a Markdown table.

    Args:
        metrics: The metrics by key.
        names: What the table calls each metric, by key.
        extra_rows: Further lines of the table, each by the key of the metric that it follows.
    """
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, estimate in metrics.items():
        lines.append(f"| {names[name]} | {format_estimate_cells(estimate)} |")
        if extra_rows and name in extra_rows:
            lines.append(extra_rows[name])
    return "\n".join(lines)


def describe_training_data(table: LabelTable, split: Split) -> dict[str, Any]:
    """Return the fields of a manifest about the LLM and the label runs."""
    settings = table.settings
    return {
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": settings.get("retriever_fingerprint"),
        "grader": settings["grader"],
        "data": [{"run": Path(run).name} for run in table.runs],
        "data_hash": settings["data_fingerprint"],
        "split": split.sizes(),
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def list_training_facts(manifest: Mapping[str, Any]) -> list[tuple[str, object]]:
    """List the rows of a card's fact table about the LLM and the label runs."""
    return [
        ("model", f"{manifest['model']['name']} ({manifest['model']['fingerprint']})"),
        ("prompts", manifest["prompts"]),
        ("label runs", ", ".join(item["run"] for item in manifest["data"])),
        ("graded by", manifest["grader"]),
    ]
