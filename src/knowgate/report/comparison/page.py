"""The evaluation as one HTML file: tables, curves, reliability, histograms, slices, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from knowgate.display import Sheet
from knowgate.evaluation import Evaluation, GateResult, second_sheet
from knowgate.files import write_text
from knowgate.report import markup
from knowgate.report.comparison import charts as eval_figures
from knowgate.report.comparison import sheets as eval_sheets
from knowgate.report.page import whole_page
from knowgate.report.question import extreme

CHARTED = 8  # gates with reliability and histogram of their own: the best by AUROC
MISTAKES = 10


def write_eval_page(evaluation: Evaluation, out: Path) -> None:
    about = f"{evaluation.trial.settings['model']}, {len(evaluation.trial.rows)} questions"
    write_text(out, whole_page("Gates compared", about, list(sections(evaluation))))


def sections(evaluation: Evaluation) -> Iterator[str]:
    yield _about(evaluation)
    if evaluation.trial.open_right is not None:
        yield _answers(evaluation)
    yield _ranking(evaluation)
    if evaluation.trial.open_right is not None:
        yield _comparisons(evaluation)
        yield _slices(evaluation)
        yield _mistakes(evaluation)
    yield _how()


def _about(evaluation: Evaluation) -> str:
    trial = evaluation.trial
    left = ", ".join(f"{count} {reason}" for reason, count in trial.left_out.items() if count) or "none"
    rows = (
        ("model", str(trial.settings["model"])),
        ("label runs", ", ".join(Path(run).name for run in trial.runs)),
        ("questions", str(len(trial.rows))),
        ("left out", left),
        ("nothing found, so answered closed-book either way", str(trial.unopened)),
        ("graded by", str(trial.settings["grader"])),
        ("intervals", f"95 %, {evaluation.resamples} bootstrap resamples"),
    )
    intro = "Every gate decides on the same recorded questions; nothing was answered again for this page."
    return markup.section("about", "What was measured", intro, [markup.table(Sheet("Trial", ("", "value"), rows))])


def _answers(evaluation: Evaluation) -> str:
    intro = (
        "Each curve retrieves for the questions of highest need first; the dot is the gate's own threshold with its "
        "95 % interval. A gate is worth something where it lies above the dotted line of retrieving at random."
    )
    parts = [
        _table(eval_sheets.main(evaluation)),
        markup.chart(eval_figures.trade_off(evaluation), "Accuracy against retrieval rate"),
        _table(eval_sheets.frontier(evaluation)),
        _table(eval_sheets.judged(evaluation)),
        _table(eval_sheets.costs(evaluation)),
        *([_table(second_sheet(evaluation.second))] if evaluation.second else []),
    ]
    return markup.section("answers", "Answers", intro, parts)


def _ranking(evaluation: Evaluation) -> str:
    intro = "How well need tells what the LLM does not know, whatever the threshold; and whether it is calibrated."
    parts = [_table(eval_sheets.ranking(evaluation))]
    for gate in _charted(evaluation):
        parts.append(markup.chart(eval_figures.reliability(evaluation, gate), f"Reliability: {gate.gate}"))
        parts.append(markup.chart(eval_figures.histogram(evaluation, gate), f"Needs: {gate.gate}"))
    return markup.section("ranking", "Ranking and calibration", intro, parts)


def _charted(evaluation: Evaluation) -> list[GateResult]:
    ranked = [gate for gate in evaluation.gates if "auroc" in gate.measures]
    return sorted(ranked, key=lambda gate: -(gate.measures["auroc"].value or 0.0))[:CHARTED]


def _comparisons(evaluation: Evaluation) -> str:
    intro = "Each gate against always retrieving, and the most accurate gate against the others, on the same questions."
    return markup.section("compared", "Comparisons", intro, [_table(eval_sheets.comparisons(evaluation))])


def _slices(evaluation: Evaluation) -> str:
    parts = [_table(sheet) for sheet in eval_sheets.slices(evaluation)]
    intro = "Accuracy @ retrieval rate, and in brackets the gain over matched random in points."
    return markup.section("slices", "Slices", intro, parts or [markup.remark("The questions are all of one kind.")])


def _mistakes(evaluation: Evaluation) -> str:
    """Of the best gate: the harmful skips it was surest of, the useless retrievals likewise."""
    ranked = _charted(evaluation)
    if not ranked or evaluation.trial.open_right is None:
        return ""
    gate, trial = ranked[0], evaluation.trial
    retrieve, helps = gate.needs > gate.threshold, evaluation.trial.open_right & ~trial.closed_right
    skipped = [row for row in np.argsort(gate.needs, kind="stable") if not retrieve[row] and helps[row]][:MISTAKES]
    hurt = trial.closed_right & ~evaluation.trial.open_right
    fetched = [row for row in np.argsort(-gate.needs, kind="stable") if retrieve[row] and hurt[row]][:MISTAKES]
    parts = ["<h3>Skipped, though retrieval would have helped</h3>", *_rows(evaluation, gate, skipped)]
    parts += ["<h3>Retrieved for, and the passages destroyed a right answer</h3>", *_rows(evaluation, gate, fetched)]
    return markup.section("mistakes", "Worst mistakes", f"Of {gate.gate}, the gate that ranks best here.", parts)


def _rows(evaluation: Evaluation, gate: GateResult, rows: list[int]) -> list[str]:
    shown = [f"<p>need {gate.needs[row]:.2f}</p>{extreme(evaluation.trial.rows[row])}" for row in rows]
    return shown or [markup.remark("none.")]


def _table(sheet: Sheet) -> str:
    return markup.table(sheet, eval_sheets.HOW)


def _how() -> str:
    parts = [markup.definitions("Definitions", eval_sheets.HOW)]
    return markup.section("how", "How every number is computed", "What the heads of the tables link to.", parts)
