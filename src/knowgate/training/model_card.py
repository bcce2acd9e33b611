"""Model cards in Markdown: the parts that cards of gates, arbiters and rerankers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from knowgate.core.display import escape_markdown, escape_markdown_code

EstimateRecord = Mapping[str, float | None]


def join_card(parts: Iterable[str], notes: Sequence[str] = (), command: str = "") -> str:
    """Join the sections of a card, followed by notes and the command that made the artifact."""
    sections = list(parts)
    if notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in notes))
    if command:
        sections.append(f"## Made by\n\n```console\n{escape_markdown_code(command)}\n```")
    return "\n\n".join(sections) + "\n"


def format_facts(rows: Iterable[tuple[str, object]]) -> str:
    """Format a table of names and values; rows without a value are left out."""
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
    """Format metrics as a table; `extra_rows` maps a metric to a line that follows it."""
    lines = ["| measure | value | 95 % interval |", "|---|---|---|"]
    for name, estimate in metrics.items():
        lines.append(f"| {names[name]} | {format_estimate_cells(estimate)} |")
        if extra_rows and name in extra_rows:
            lines.append(extra_rows[name])
    return "\n".join(lines)
