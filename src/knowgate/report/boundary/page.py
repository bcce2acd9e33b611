"""The boundary report as one HTML file: what the LLM knows in a sentence and a picture, then the detail, folded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knowgate.evaluation import INDICATORS, RunReport
from knowgate.files import write_text
from knowgate.markup import escape
from knowgate.report import markup
from knowgate.report.boundary import charts, sheets
from knowgate.report.boundary.verdict import boundary_words
from knowgate.report.page import whole_page
from knowgate.report.question import extreme
from knowgate.runs import synthetic_words


def write_page(runs: Sequence[RunReport], out: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(out, page(runs))


def page(runs: Sequence[RunReport]) -> str:
    return whole_page("What your LLM knows", ", ".join(run.name for run in runs), sections(runs))


def sections(runs: Sequence[RunReport]) -> list[str]:
    return [
        markup.cautions([words for run in runs if (words := _synthetic(run))]),
        _known(runs),
        _accuracy(runs),
        _savings(runs),
        *(_extremes(runs, name) for name in ("harmed", "helped")),
        _effects(runs),
        _copying(runs),
        _slices(runs),
        _agreement(runs),
        markup.folded("runs", "Runs", "What was asked of which model, and how it was graded.", [_about(runs)]),
    ]


def _synthetic(run: RunReport) -> str:
    return synthetic_words(run.boundary.counts.synthetic, run.boundary.counts.rows)


def _known(runs: Sequence[RunReport]) -> str:
    said = [boundary_words(run) for run in runs]
    heads = "".join(f"<h2>{markup.text(first)}</h2><p>{escape(' '.join(rest))}</p>" for first, *rest in said)
    drawn = charts.knowledge(runs) if any(charts.four_parts(run) for run in runs) else ""
    picture = markup.figure(drawn, "What the LLM knows, and what passages do") if drawn else ""
    return f'<section class="verdict unknown" id="known">{heads}{picture}</section>'


def _about(runs: Sequence[RunReport]) -> str:
    return markup.table(sheets.about(runs))


def _accuracy(runs: Sequence[RunReport]) -> str:
    intro = (
        "Share of right greedy answers: closed book to the bare question, open book with the passages, MASK with the "
        "gold answers in the passages replaced. Closed and open book are compared on the questions that found "
        "passages. Lines are 95 % Wilson intervals. Below: how often retrieval turned a "
        "wrong answer right (+1) or a right one wrong (-1)."
    )
    graded = any(run.boundary.accuracy.closed.n or run.boundary.accuracy.open.n for run in runs)
    picture = [markup.figure(charts.accuracy(runs), "Accuracy")] if graded else []
    parts = [*picture, markup.table(sheets.accuracy(runs))]
    return markup.section("accuracy", "Accuracy", intro, parts)


def _effects(runs: Sequence[RunReport]) -> str:
    intro = (
        "Retrieval is beneficial where the indicator rises with passages, harmful where it falls, neutral where it "
        "stays. Mastery: share of right samples. Certainty: 1 - normalised entropy of the samples, which needs no gold "
        "answers. At mastery 1 nothing is left to gain. First over what the model knew closed-book; then, where those "
        "answers were sampled, over what it reached with the passages and with the gold answers in them masked."
    )
    sides = ("closed", *sheets.sampled_sides(runs))
    parts = [_effect_charts(run, sides) for run in runs]
    parts += [markup.table(sheets.effects(runs, indicator, side)) for side in sides for indicator in INDICATORS]
    parts.append(markup.table(sheets.correlation(runs)))
    return markup.folded("effects", "Who is helped, who is harmed", intro, parts)


def _effect_charts(run: RunReport, sides: Sequence[str]) -> str:
    if not run.boundary.counts.with_open:
        return markup.remark(f"{run.name}: {sheets.NO_OPEN}.")
    return "".join(_effect_pair(run, side) for side in sides if side in ("closed", *sheets.sampled_sides([run])))


def _effect_pair(run: RunReport, side: str) -> str:
    title = f"{run.name}: effect by {sheets.SIDE_NAMES[side]}"
    return markup.pair([markup.figure(charts.effects(run, name, side), f"{title} {name}") for name in INDICATORS])


def _savings(runs: Sequence[RunReport]) -> str:
    intro = (
        "If retrieval is skipped where the closed-book indicator reaches a threshold: how much of it is saved, and how "
        "accurate the answers stay. Every distinct threshold is a dot. The dotted line skips as many questions at "
        "random: an indicator is worth what it gains over that line. Mastery knows the gold answers, so its curve is "
        "what a perfect predictor of mastery would reach; certainty can be had without them. "
        "Differences are in percentage points."
    )
    pictures = {name: charts.savings(runs, name) for name in INDICATORS}
    drawn = markup.pair([markup.figure(one, f"Skipping by {name}") for name, one in pictures.items() if one])
    without = [markup.remark(f"{run.name}: {sheets.NO_OPEN}.") for run in runs if not run.boundary.counts.with_open]
    parts = [drawn, *without, *(markup.table(sheets.savings(runs, name)) for name in INDICATORS)]
    return markup.section("savings", "Retrieval saved, accuracy kept", intro, parts)


def _copying(runs: Sequence[RunReport]) -> str:
    intro = (
        "Does the model copy from the passages or reason with them? Among questions whose open-book samples all agree "
        "(certainty 1): how often the answer is the word MASK once the gold answers are masked."
    )
    drawn = charts.copying(runs)
    parts = [markup.figure(drawn, "Copy rate")] if drawn else []
    return markup.folded("copying", "Copy rate", intro, [*parts, markup.table(sheets.copying(runs))])


def _slices(runs: Sequence[RunReport]) -> str:
    intro = (
        "The same numbers for parts of the data; closed and open book on the questions that were answered both ways. "
        "Answer frequency: thirds of a run by how many passages of the corpus "
        "hold the answer; equal counts stay together, so a third can be empty."
    )
    parts = [markup.table(sheet) for sheet in sheets.slices(runs)]
    nothing = [markup.remark("Nothing in these runs splits them: one data set, one language, one form.")]
    return markup.folded("slices", "Slices", intro, parts or nothing)


def _agreement(runs: Sequence[RunReport]) -> str:
    intro = (
        "The greedy answers graded anew by the string rules, against each other and against the judge's verdicts if "
        "the run has any. Kappa: agreement beyond chance."
    )
    return markup.folded("agreement", "Agreement of graders", intro, [markup.table(sheets.agreements(runs))])


def _extremes(runs: Sequence[RunReport], name: str) -> str:
    intro = "Up to twenty per run, by the change of mastery from closed to open book, then by benefit."
    parts = []
    for run in runs:
        questions = [extreme(row) for row in getattr(run.boundary, name)]
        none = f"none was {name}" if run.boundary.counts.with_open else sheets.NO_OPEN
        parts += [f"<h3>{escape(run.name)}</h3>", *(questions or [markup.remark(f"{none}.")])]
    return markup.section(name, f"Most {name} questions", intro, parts)
