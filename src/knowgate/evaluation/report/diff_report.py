"""Report of the differences between two evaluations, called A and B: tables, verdict, page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from knowgate.core.display import MISSING_VALUE, TextTable
from knowgate.core.files import write_text
from knowgate.evaluation.evaluation_diff import EvaluationDiff, GateDiff, is_certain_fall
from knowgate.evaluation.gate_comparison import format_estimate
from knowgate.evaluation.report import html
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_percent_estimate, format_points_estimate

MEASURE_NAMES = {"accuracy": "accuracy", "rate": "searches", "auroc": "AUROC"}
MAX_TERMINAL_GATES = 12
DIFF_LABELS = {"use": "Better", "leave": "Worse", "unknown": "No significant difference"}
DIFF_DEFINITIONS = html.load_texts("diff")


@dataclass(frozen=True)
class DiffVerdict:
    """Whether evaluation B is better or worse than evaluation A.

    Attributes:
        level: 'use' if B is better, 'leave' if it is worse, 'unknown' if neither is shown.
        headline: The verdict in a sentence.
        details: By how much, in a sentence.
    """

    level: Literal["use", "leave", "unknown"]
    headline: str
    details: str = ""


def build_diff_verdict(diff: EvaluationDiff) -> DiffVerdict:
    """Judge whether evaluation B is better or worse than A, by the accuracy of the watched gates.

    A change counts if its whole interval is above or below 0.
    """
    differences = diff.watched_differences
    fallen = {gate: change for gate, change in differences.items() if is_certain_fall(change)}
    risen = {gate: change for gate, change in differences.items() if change.low is not None and change.low > 0}
    if fallen:
        return DiffVerdict("leave", "B is worse than A.", _list_differences(fallen))
    if risen:
        return DiffVerdict("use", "B is better than A.", _list_differences(risen))
    if not differences:
        return DiffVerdict("unknown", "B and A cannot be told apart by their answers.", "See the ranking by need.")
    return DiffVerdict("unknown", "No significant difference between A and B.", _list_differences(differences))


def _list_differences(differences: dict[str, Estimate]) -> str:
    """List each gate's change in accuracy from evaluation A to B, in points."""
    texts = (f"'{gate}' {format_points_estimate(difference)}" for gate, difference in differences.items())
    return f"Points of accuracy, with 95 % intervals: {'; '.join(texts)}."


def describe_pairing(diff: EvaluationDiff) -> str:
    """Say whether A and B are compared question by question, or why not."""
    if diff.paired:
        return f"Differences are paired, over the {diff.paired:,} questions that A and B share."
    shared = f"share {diff.shared:,} questions" if diff.shared else "share no questions (or one lacks its decisions)"
    return (
        f"A and B {shared}, and {diff.needed:,} are needed to compare them question by question. So they are compared as "
        "independent samples."
    )


def describe_uncompared_gates(diff: EvaluationDiff) -> str:
    """Name the gates of only one evaluation, or return ''."""
    uncompared = {"A": diff.only_first, "B": diff.only_second}
    texts = [f"only {side} has {', '.join(gates)}" for side, gates in uncompared.items() if gates]
    return f"Not compared: {'; '.join(texts)}." if texts else ""


# --- tables ---------------------------------------------------------------------------------------


def build_diff_table(diff: EvaluationDiff, gates: Sequence[GateDiff]) -> TextTable:
    """Build the table of gates. Each measure has three columns: A, B and difference."""
    measures = [measure for measure in MEASURE_NAMES if any(measure in gate.changes for gate in diff.gates)]
    columns = ["gate"]
    for measure in measures:
        columns += [f"{MEASURE_NAMES[measure]}, A", "B", "B - A"]
    rows = []
    for gate in gates:
        cells = [gate.gate]
        for measure in measures:
            cells += _make_measure_cells(gate, measure)
        rows.append(tuple(cells))
    return TextTable("Differences with 95 % intervals, in points", tuple(columns), tuple(rows))


def select_gates(diff: EvaluationDiff) -> list[GateDiff]:
    """Select the gates to show: all watched ones, then the most changed ones."""
    watched = [gate for gate in diff.gates if gate.gate in diff.watched]
    others = sorted((gate for gate in diff.gates if gate not in watched), key=_measure_change, reverse=True)
    return (watched + others)[: max(MAX_TERMINAL_GATES, len(watched))]


def _measure_change(gate: GateDiff) -> float:
    """Return the absolute change of accuracy, or else of AUROC."""
    change = gate.changes.get("accuracy") or gate.changes.get("auroc")
    return abs(change.difference.value or 0.0) if change else 0.0


def _make_measure_cells(gate: GateDiff, measure: str) -> tuple[str, str, str]:
    """Return the cells of a measure: in A, in B, and the change."""
    change = gate.changes.get(measure)
    if change is None:
        return MISSING_VALUE, MISSING_VALUE, MISSING_VALUE
    show = format_estimate if measure == "auroc" else format_percent_estimate
    return show(change.first), show(change.second), format_points_estimate(change.difference)


def build_sides_table(diff: EvaluationDiff) -> TextTable:
    """Build the table that describes both evaluations."""
    first, second = diff.first, diff.second
    rows = [
        ("folder", first.name, second.name),
        ("model", first.model, second.model),
        ("questions", f"{first.n:,}", f"{second.n:,}"),
        ("recommended", first.recommendation, second.recommendation),
    ]
    if first.arbiter or second.arbiter:
        rows.append(("arbiter", first.arbiter or "none", second.arbiter or "none"))
    return TextTable("What is compared", ("", "A", "B"), tuple(rows))


# --- page -----------------------------------------------------------------------------------------


def write_diff_page(diff: EvaluationDiff, out: Path) -> None:
    """Write the comparison of two evaluations as one HTML file."""
    subtitle = f"A: {diff.first.name}, B: {diff.second.name}"
    write_text(out, html.render_page("Two evaluations compared", subtitle, list(build_diff_sections(diff))))


def build_diff_sections(diff: EvaluationDiff) -> Iterator[str]:
    """Build the sections of the HTML page that compares two evaluations: the verdict, the tables and definitions."""
    verdict = build_diff_verdict(diff)
    sentences = " ".join([verdict.details, describe_pairing(diff), describe_uncompared_gates(diff)])
    yield html.render_verdict(verdict.level, DIFF_LABELS[verdict.level], verdict.headline, sentences)
    sides = html.render_table(build_sides_table(diff), css_class="text")
    yield html.render_section("sides", "What is compared", "", [sides])
    table = html.render_table(build_diff_table(diff, diff.gates), DIFF_DEFINITIONS, "sortable wide", diff.watched)
    intro = "Click a column header to sort. The gates that count are highlighted."
    yield html.render_section("gates", "What changed", intro, [table])
    definitions = html.render_definitions(DIFF_DEFINITIONS)
    yield html.render_folded_section("how", "How every number is computed", "", [definitions])
