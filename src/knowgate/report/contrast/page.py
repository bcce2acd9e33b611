"""Two evaluations on one page: better or worse, one picture, all gates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from knowgate.display import points_with_interval
from knowgate.evaluation import Contrast
from knowgate.files import write_text
from knowgate.markup import escape
from knowgate.report import markup
from knowgate.report.bars import Row, dot_rows
from knowgate.report.contrast import sheets
from knowgate.report.page import whole_page

LABELS = {"use": "Better", "leave": "Worse", "unknown": "No difference shown"}
HOW = {
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


def write_contrast_page(found: Contrast, out: Path) -> None:
    """Write the page, whole or not at all."""
    about = f"A: {found.first.name}, B: {found.second.name}"
    write_text(out, whole_page("Two evaluations compared", about, list(sections(found))))


def sections(found: Contrast) -> Iterator[str]:
    head = sheets.headline(found)
    words = f"<h2>{escape(head.said)}</h2><p>{escape(head.told)} {escape(sheets.basis(found))} "
    words += f"{escape(sheets.left_out(found))}</p>"
    label = f'<p class="light">{LABELS[head.light]}</p>'
    yield f'<section class="verdict {head.light}" id="verdict">{label}{words}</section>'
    yield _picture(found)
    yield markup.section("sides", "What is compared", "", [markup.table(sheets.sides(found), kind="text")])
    every = markup.wide_table(sheets.differences(found), HOW, found.watched)
    intro = "Heads sort. The gates that count stand out."
    yield markup.folded("gates", "All gates", intro, [every], f"{len(found.gates)} on both sides")
    yield markup.folded("how", "How every number is computed", "", [markup.definitions("Definitions", HOW)])


def _picture(found: Contrast) -> str:
    intro = "Accuracy of B less that of A, with 95 % intervals: the gates that count, then those that changed most."
    rows = [
        Row(one.gate, change.difference.value or 0.0, change.difference.low, change.difference.high,
            f"{one.gate}: {points_with_interval(change.difference)} points")
        for one in sheets.picked(found)
        if (change := one.changes.get("accuracy")) and sheets.is_shown(change)
    ]  # fmt: skip
    if not rows:
        nothing = [markup.remark("No gate has answers with and without passages on both sides.")]
        return markup.section("picture", "What changed", intro, nothing)
    title = "Accuracy, B less A"
    drawn = dot_rows(rows, title, "; ".join(row.says for row in rows), "points, B less A")
    return markup.section("picture", "What changed", intro, [markup.figure(drawn, title)])
