"""The evaluation as one HTML file: tables, curves, reliability, histograms, slices, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from knowgate.display import Sheet
from knowgate.evaluation import Evaluation, GateResult
from knowgate.files import write_text
from knowgate.report import markup
from knowgate.report.comparison import charts as eval_figures
from knowgate.report.comparison import sheets as eval_sheets
from knowgate.report.page import whole_page
from knowgate.report.question import extreme

CHARTED = 8  # gates with reliability and histogram of their own: the best by AUROC
MISTAKES = 10


def write_eval_page(found: Evaluation, out: Path) -> None:
    about = f"{found.trial.settings['model']}, {len(found.trial.rows)} questions"
    write_text(out, whole_page("Gates compared", about, list(sections(found))))


def sections(found: Evaluation) -> Iterator[str]:
    yield _about(found)
    if found.trial.open_right is not None:
        yield _answers(found)
    yield _ranking(found)
    if found.trial.open_right is not None:
        yield _comparisons(found)
        yield _slices(found)
        yield _mistakes(found)
    yield _how()


def _about(found: Evaluation) -> str:
    trial = found.trial
    left = ", ".join(f"{count} {reason}" for reason, count in trial.left_out.items() if count) or "none"
    rows = (
        ("model", str(trial.settings["model"])),
        ("label runs", ", ".join(Path(run).name for run in trial.runs)),
        ("questions", str(len(trial.rows))),
        ("left out", left),
        ("nothing found, so answered closed-book either way", str(trial.unopened)),
        ("graded by", str(trial.settings["grader"])),
        ("intervals", f"95 %, {found.resamples} bootstrap resamples"),
    )
    intro = "Every gate decides on the same recorded questions; nothing was answered again for this page."
    return markup.section("about", "What was measured", intro, [markup.table(Sheet("Trial", ("", "value"), rows))])


def _answers(found: Evaluation) -> str:
    intro = (
        "Each curve retrieves for the questions of highest need first; the dot is the gate's own threshold with its "
        "95 % interval. A gate is worth something where it lies above the dotted line of retrieving at random."
    )
    parts = [
        _table(eval_sheets.main(found)),
        markup.chart(eval_figures.trade_off(found), "Accuracy against retrieval rate"),
        _table(eval_sheets.frontier(found)),
        _table(eval_sheets.judged(found)),
        _table(eval_sheets.costs(found)),
    ]
    return markup.section("answers", "Answers", intro, parts)


def _ranking(found: Evaluation) -> str:
    intro = "How well need tells what the LLM does not know, whatever the threshold; and whether it is calibrated."
    parts = [_table(eval_sheets.ranking(found))]
    for gate in _charted(found):
        parts.append(markup.chart(eval_figures.reliability(found, gate), f"Reliability: {gate.gate}"))
        parts.append(markup.chart(eval_figures.histogram(found, gate), f"Needs: {gate.gate}"))
    return markup.section("ranking", "Ranking and calibration", intro, parts)


def _charted(found: Evaluation) -> list[GateResult]:
    ranked = [gate for gate in found.gates if "auroc" in gate.measures]
    return sorted(ranked, key=lambda gate: -(gate.measures["auroc"].value or 0.0))[:CHARTED]


def _comparisons(found: Evaluation) -> str:
    intro = "Each gate against always retrieving, and the most accurate gate against the others, on the same questions."
    return markup.section("compared", "Comparisons", intro, [_table(eval_sheets.comparisons(found))])


def _slices(found: Evaluation) -> str:
    parts = [_table(sheet) for sheet in eval_sheets.slices(found)]
    intro = "Accuracy @ retrieval rate, and in brackets the gain over matched random in points."
    return markup.section("slices", "Slices", intro, parts or [markup.remark("The questions are all of one kind.")])


def _mistakes(found: Evaluation) -> str:
    """Of the best gate: the harmful skips it was surest of, the useless retrievals likewise."""
    ranked = _charted(found)
    if not ranked or found.trial.open_right is None:
        return ""
    gate, trial = ranked[0], found.trial
    retrieve, helps = gate.needs > gate.threshold, found.trial.open_right & ~trial.closed_right
    skipped = [place for place in np.argsort(gate.needs) if not retrieve[place] and helps[place]][:MISTAKES]
    hurt = trial.closed_right & ~found.trial.open_right
    fetched = [place for place in np.argsort(-gate.needs) if retrieve[place] and hurt[place]][:MISTAKES]
    parts = ["<h3>Skipped, though retrieval would have helped</h3>", *_rows(found, gate, skipped)]
    parts += ["<h3>Retrieved for, and the passages destroyed a right answer</h3>", *_rows(found, gate, fetched)]
    return markup.section("mistakes", "Worst mistakes", f"Of {gate.gate}, the gate that ranks best here.", parts)


def _rows(found: Evaluation, gate: GateResult, places: list[int]) -> list[str]:
    shown = [f"<p>need {gate.needs[place]:.2f}</p>{extreme(found.trial.rows[place])}" for place in places]
    return shown or [markup.remark("none.")]


def _table(sheet: Sheet) -> str:
    return markup.table(sheet, eval_sheets.HOW)


def _how() -> str:
    parts = [markup.definitions("Definitions", eval_sheets.HOW)]
    return markup.section("how", "How every number is computed", "What the heads of the tables link to.", parts)
