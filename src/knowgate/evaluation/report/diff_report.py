"""Two evaluations on one page: better or worse, one picture, all gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.core.files import write_text
from knowgate.evaluation.evaluation_diff import EvaluationDiff, GateDiff, MeasureDiff
from knowgate.evaluation.report import diff_report as sheets
from knowgate.evaluation.report import html as markup
from knowgate.evaluation.report.charts import DotRow, draw_dot_chart
from knowgate.evaluation.report.html import render_page
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.formats import format_percent_estimate, format_points_estimate
from knowgate.types.markup import escape_html

DIFF_LABELS = {"use": "Better", "leave": "Worse", "unknown": "No difference shown"}
DIFF_DEFINITIONS = {
    "accuracy": "share of right final answers, each gate at its own threshold",
    "searches": "share of questions retrieved for",
    "AUROC": "how well need tells questions answered wrong closed-book from those answered right",
    "B - A": "in points. Paired: bootstrap over the shared questions of the difference on each; what stands under A "
    "and B is then of those questions too. Else the two intervals are added in squares, as of independent samples. "
    "AUROC is never paired",
    "recommended": "each side's recommendation at its threshold; always retrieving where no gate is worth using",
    "+ arbiter": "the gate with each side's arbiter behind it, which chooses between the answers after a search",
    "gates that count": "never, always, recommended and all with an arbiter behind, or those named with --gate: of "
    "many, some change by chance",
}


def write_diff_page(found: EvaluationDiff, out: Path) -> None:
    """Write the page, whole or not at all."""
    about = f"A: {found.first.name}, B: {found.second.name}"
    write_text(out, render_page("Two evaluations compared", about, list(build_diff_sections(found))))


def build_diff_sections(found: EvaluationDiff) -> Iterator[str]:
    head = sheets.build_diff_verdict(found)
    words = (
        f"<h2>{escape_html(head.said)}</h2><p>{escape_html(head.told)} {escape_html(sheets.describe_pairing(found))} "
    )
    words += f"{escape_html(sheets.describe_uncompared_gates(found))}</p>"
    label = f'<p class="light">{DIFF_LABELS[head.light]}</p>'
    yield f'<section class="verdict {head.light}" id="verdict">{label}{words}</section>'
    yield _picture(found)
    yield markup.render_section(
        "sides", "What is compared", "", [markup.render_table(sheets.build_sides_table(found), kind="text")]
    )
    every = markup.render_wide_table(sheets.build_diff_table(found), DIFF_DEFINITIONS, found.watched)
    intro = "Heads sort. The gates that count stand out."
    yield markup.render_folded_section("gates", "All gates", intro, [every], f"{len(found.gates)} on both sides")
    yield markup.render_folded_section(
        "how", "How every number is computed", "", [markup.render_definitions("Definitions", DIFF_DEFINITIONS)]
    )


def _picture(found: EvaluationDiff) -> str:
    intro = "Accuracy of B less that of A, with 95 % intervals: the gates that count, then those that changed most."
    rows = [
        DotRow(one.gate, change.difference.value or 0.0, change.difference.low, change.difference.high,
            f"{one.gate}: {format_points_estimate(change.difference)} points")
        for one in sheets.select_gates(found)
        if (change := one.changes.get("accuracy")) and sheets.has_difference(change)
    ]  # fmt: skip
    if not rows:
        nothing = [markup.render_remark("No gate has answers with and without passages on both sides.")]
        return markup.render_section("picture", "What changed", intro, nothing)
    title = "Accuracy, B less A"
    drawn = draw_dot_chart(rows, title, "; ".join(row.says for row in rows), "points, B less A")
    return markup.render_section("picture", "What changed", intro, [markup.render_figure(drawn, title)])


MEASURE_NAMES = {"accuracy": "accuracy", "rate": "searches", "auroc": "AUROC"}
MAX_TERMINAL_GATES = 12  # gates on a terminal; the page has all


def build_short_diff_table(found: EvaluationDiff) -> TextTable:
    """For a terminal: the gates that count and those that changed most."""
    kind = "accuracy" if any("accuracy" in one.changes for one in found.gates) else "auroc"
    rows = tuple((one.gate, *_plain(one, kind), _moved(one)) for one in select_gates(found))
    return TextTable("B less A, in points", ("gate", f"{MEASURE_NAMES[kind]}, A", "B", "B - A", "searches"), rows)


def _moved(one: GateDiff) -> str:
    value = one.changes["rate"].difference.value if "rate" in one.changes else None
    return MISSING_VALUE if value is None else format_points(value)


def _plain(one: GateDiff, kind: str) -> tuple[str, str, str]:
    if kind not in one.changes:
        return MISSING_VALUE, MISSING_VALUE, MISSING_VALUE
    change = one.changes[kind]
    return (
        format_percent(change.first.value),
        format_percent(change.second.value),
        format_points_estimate(change.difference),
    )


def build_diff_table(found: EvaluationDiff) -> TextTable:
    """A is the first side, B the second; differences are B less A, in points."""
    kinds = [kind for kind in MEASURE_NAMES if any(kind in one.changes for one in found.gates)]
    columns = ["gate"]
    for kind in kinds:
        columns += [f"{MEASURE_NAMES[kind]}, A", "B", "B - A"]
    rows = tuple((one.gate, *(cell for kind in kinds for cell in _cells(one, kind))) for one in found.gates)
    return TextTable("Differences with 95 % intervals, in points", tuple(columns), rows)


def select_gates(found: EvaluationDiff) -> list[GateDiff]:
    """The gates that count first, then those whose accuracy changed most."""
    watched = [one for one in found.gates if one.gate in found.watched]
    others = sorted((one for one in found.gates if one not in watched), key=_size, reverse=True)
    return (watched + others)[: max(MAX_TERMINAL_GATES, len(watched))]


def _size(one: GateDiff) -> float:
    change = one.changes.get("accuracy") or one.changes.get("auroc")
    return abs(change.difference.value or 0.0) if change else 0.0


def _cells(one: GateDiff, kind: str) -> tuple[str, str, str]:
    change = one.changes.get(kind)
    if change is None:
        return MISSING_VALUE, MISSING_VALUE, MISSING_VALUE
    show = _auroc if kind == "auroc" else format_percent_estimate
    return show(change.first), show(change.second), format_points_estimate(change.difference)


def _auroc(found: Estimate) -> str:
    return MISSING_VALUE if found.value is None else found.shown()


def build_sides_table(found: EvaluationDiff) -> TextTable:
    behind = [("arbiter", found.first.arbiter or "none", found.second.arbiter or "none")]
    rows = [
        ("folder", found.first.name, found.second.name),
        ("model", found.first.model, found.second.model),
        ("questions", f"{found.first.n:,}", f"{found.second.n:,}"),
        ("recommended", found.first.recommended, found.second.recommended),
        *(behind if found.first.arbiter or found.second.arbiter else []),
        ("gates only there", ", ".join(found.only_first) or "none", ", ".join(found.only_second) or "none"),
    ]
    return TextTable("What is compared", ("", "A", "B"), tuple(rows))


def describe_pairing(found: EvaluationDiff) -> str:
    """What the intervals rest on."""
    if found.paired:
        return f"Differences are paired, over the {found.paired:,} questions that A and B share."
    shared = f"share {found.shared:,} questions" if found.shared else "share no question (or one keeps no decisions)"
    takes = f"to pair them takes {found.needed:,}"
    return f"A and B {shared}; {takes}. So differences are those of independent samples."


def describe_uncompared_gates(found: EvaluationDiff) -> str:
    """Gates that one side alone has, so that nothing can be said of them; '' where there are none."""
    named = [
        f"only {side} has {', '.join(gates)}"
        for side, gates in (("A", found.only_first), ("B", found.only_second))
        if gates
    ]
    return f"Not compared: {'; '.join(named)}." if named else ""


@dataclass(frozen=True)
class DiffVerdict:
    """light: as on every report. said: better, worse or neither. told: by how much."""

    light: Literal["use", "leave", "unknown"]
    said: str
    told: str = ""


def build_diff_verdict(found: EvaluationDiff) -> DiffVerdict:
    """By the accuracy of the gates that count: one that fell for certain is enough for 'worse'."""
    changes = {
        one.gate: one.changes["accuracy"].difference
        for one in found.gates
        if one.gate in found.watched and "accuracy" in one.changes
    }
    down = {gate: one for gate, one in changes.items() if one.high is not None and one.high < 0}
    up = {gate: one for gate, one in changes.items() if one.low is not None and one.low > 0}
    if down:
        return DiffVerdict("leave", "B is worse than A.", _told(down))
    if up:
        return DiffVerdict("use", "B is better than A.", _told(up))
    if not changes:
        return DiffVerdict("unknown", "B and A cannot be told apart by their answers.", "See how needs rank.")
    return DiffVerdict("unknown", "No difference between A and B is shown.", _told(changes))


def _told(changes: dict[str, Estimate]) -> str:
    told = (f"'{gate}' {format_points_estimate(one)}" for gate, one in changes.items())
    return f"Points of accuracy, with 95 % intervals: {'; '.join(told)}."


def has_difference(change: MeasureDiff) -> bool:
    """Whether a difference can be drawn."""
    return change.difference.value is not None
