"""The boundary report as one HTML file: what the LLM knows in a sentence and a picture, then the detail, folded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knowgate.core.chart import Axis, fit_axis
from knowgate.core.chart import ChartPoint as Place
from knowgate.core.display import format_percent
from knowgate.core.files import write_text
from knowgate.data.runs.caveats import describe_synthetic
from knowgate.evaluation.boundary import EffectInterval, RunReport
from knowgate.evaluation.boundary_measures import INDICATORS
from knowgate.evaluation.report import boundary_page as charts
from knowgate.evaluation.report import boundary_tables as sheets
from knowgate.evaluation.report import html as markup
from knowgate.evaluation.report.boundary_tables import SIDE_NAMES as PANEL_NAMES
from knowgate.evaluation.report.boundary_tables import format_interval, get_effect_intervals, get_matched_accuracy
from knowgate.evaluation.report.charts import (
    Bar,
    BarGroup,
    PlotArea,
    PlotLine,
    build_color_key,
    draw_bar_chart,
    draw_line_plot,
    pick_line_style,
)
from knowgate.evaluation.report.html import render_extreme_question, render_page
from knowgate.stats.proportions import Proportion
from knowgate.types.markup import escape_html

GOLD_ANSWER_ADVICE = 'Give the questions gold answers, "answers": [...], and label again: knowgate label'


def describe_boundary(run: RunReport) -> list[str]:
    """One sentence on what it knows, then how sure that is and what passages do to it."""
    accuracy, counts = run.boundary.accuracy, run.boundary.counts
    if not accuracy.closed.n:
        nothing = f"What {run.name} knows cannot be said: none of its {counts.rows:,} answers is graded."
        return [nothing, _ungraded(run), GOLD_ANSWER_ADVICE]
    known = f"{run.name} knows {format_percent(accuracy.closed.value)} of these questions by itself."
    sure = f"Of {accuracy.closed.n:,} questions{_interval(accuracy.closed)}."
    return [known, sure, _passages(run), *([_ungraded(run)] if counts.rows > counts.failed + accuracy.closed.n else [])]


def _ungraded(run: RunReport) -> str:
    counts = run.boundary.counts
    missing = counts.rows - counts.failed - run.boundary.accuracy.closed.n
    why = ": they have no gold answers" if counts.without_gold >= missing > 0 else ""
    return f"{missing:,} questions are not graded{why}, {counts.failed:,} failed."


def _passages(run: RunReport) -> str:
    accuracy, benefit = run.boundary.accuracy, run.boundary.benefit
    if not accuracy.open.n:
        return "No question was answered with passages, so what retrieval does is not known."
    n = benefit.helps + benefit.neutral + benefit.hurts
    helps, hurts, neutral = (format_percent(count / n) for count in (benefit.helps, benefit.hurts, benefit.neutral))
    some = accuracy.open.n < accuracy.closed.n
    same = f"{accuracy.open.n:,} questions that found passages" if some else "same questions"
    return (
        f"With passages it is right on {format_percent(accuracy.open.value)}{_interval(accuracy.open)} of the {same}, without "
        f"them on {format_percent(accuracy.matched.value)}: they turn {helps} of "
        f"the answers right, spoil {hurts}, and change nothing about {neutral}, where a search is paid for in vain."
    )


def _interval(share: Proportion) -> str:
    if share.low is None or share.high is None:
        return ""
    return f" (95 % interval {100 * share.low:.1f} to {100 * share.high:.1f})"


def write_boundary_page(runs: Sequence[RunReport], out: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(out, render_boundary_page(runs))


def render_boundary_page(runs: Sequence[RunReport]) -> str:
    return render_page("What your LLM knows", ", ".join(run.name for run in runs), build_boundary_sections(runs))


def build_boundary_sections(runs: Sequence[RunReport]) -> list[str]:
    return [
        markup.render_cautions([words for run in runs if (words := _synthetic(run))]),
        _known(runs),
        _accuracy(runs),
        _savings(runs),
        *(_extremes(runs, name) for name in ("harmed", "helped")),
        _effects(runs),
        _copying(runs),
        _slices(runs),
        _agreement(runs),
        markup.render_folded_section(
            "runs", "Runs", "What was asked of which model, and how it was graded.", [_about(runs)]
        ),
    ]


def _synthetic(run: RunReport) -> str:
    return describe_synthetic(run.boundary.counts.synthetic, run.boundary.counts.rows)


def _known(runs: Sequence[RunReport]) -> str:
    said = [describe_boundary(run) for run in runs]
    heads = "".join(
        f"<h2>{markup.render_text(first)}</h2><p>{escape_html(' '.join(rest))}</p>" for first, *rest in said
    )
    drawn = charts.draw_knowledge_chart(runs) if any(charts.compute_knowledge_shares(run) for run in runs) else ""
    picture = markup.render_figure(drawn, "What the LLM knows, and what passages do") if drawn else ""
    return f'<section class="verdict unknown" id="known">{heads}{picture}</section>'


def _about(runs: Sequence[RunReport]) -> str:
    return markup.render_table(sheets.build_settings_table(runs))


def _accuracy(runs: Sequence[RunReport]) -> str:
    intro = (
        "Share of right greedy answers: closed book to the bare question, open book with the passages, MASK with the "
        "gold answers in the passages replaced. Closed and open book are compared on the questions that found "
        "passages. Lines are 95 % Wilson intervals. Below: how often retrieval turned a "
        "wrong answer right (+1) or a right one wrong (-1)."
    )
    graded = any(run.boundary.accuracy.closed.n or run.boundary.accuracy.open.n for run in runs)
    picture = [markup.render_figure(charts.draw_accuracy_chart(runs), "Accuracy")] if graded else []
    parts = [*picture, markup.render_table(sheets.build_accuracy_table(runs))]
    return markup.render_section("accuracy", "Accuracy", intro, parts)


def _effects(runs: Sequence[RunReport]) -> str:
    intro = (
        "Retrieval is beneficial where the indicator rises with passages, harmful where it falls, neutral where it "
        "stays. Mastery: share of right samples. Certainty: 1 - normalised entropy of the samples, which needs no gold "
        "answers. At mastery 1 nothing is left to gain. First over what the model knew closed-book; then, where those "
        "answers were sampled, over what it reached with the passages and with the gold answers in them masked."
    )
    sides = ("closed", *sheets.list_sampled_sides(runs))
    parts = [_effect_charts(run, sides) for run in runs]
    parts += [
        markup.render_table(sheets.build_effect_table(runs, indicator, side))
        for side in sides
        for indicator in INDICATORS
    ]
    parts.append(markup.render_table(sheets.build_correlation_table(runs)))
    return markup.render_folded_section("effects", "Who is helped, who is harmed", intro, parts)


def _effect_charts(run: RunReport, sides: Sequence[str]) -> str:
    if not run.boundary.counts.with_open:
        return markup.render_remark(f"{run.name}: {sheets.NO_OPEN_ANSWERS}.")
    return "".join(_effect_pair(run, side) for side in sides if side in ("closed", *sheets.list_sampled_sides([run])))


def _effect_pair(run: RunReport, side: str) -> str:
    title = f"{run.name}: effect by {sheets.SIDE_NAMES[side]}"
    return markup.render_pair(
        [markup.render_figure(charts.draw_effect_chart(run, name, side), f"{title} {name}") for name in INDICATORS]
    )


def _savings(runs: Sequence[RunReport]) -> str:
    intro = (
        "If retrieval is skipped where the closed-book indicator reaches a threshold: how much of it is saved, and how "
        "accurate the answers stay. Every distinct threshold is a dot. The dotted line skips as many questions at "
        "random: an indicator is worth what it gains over that line. Mastery knows the gold answers, so its curve is "
        "what a perfect predictor of mastery would reach; certainty can be had without them. "
        "Differences are in percentage points."
    )
    pictures = {name: charts.draw_saving_chart(runs, name) for name in INDICATORS}
    drawn = markup.render_pair(
        [markup.render_figure(one, f"Skipping by {name}") for name, one in pictures.items() if one]
    )
    without = [
        markup.render_remark(f"{run.name}: {sheets.NO_OPEN_ANSWERS}.")
        for run in runs
        if not run.boundary.counts.with_open
    ]
    parts = [drawn, *without, *(markup.render_table(sheets.build_saving_table(runs, name)) for name in INDICATORS)]
    return markup.render_section("savings", "Retrieval saved, accuracy kept", intro, parts)


def _copying(runs: Sequence[RunReport]) -> str:
    intro = (
        "Does the model copy from the passages or reason with them? Among questions whose open-book samples all agree "
        "(certainty 1): how often the answer is the word MASK once the gold answers are masked."
    )
    drawn = charts.draw_copy_rate_chart(runs)
    parts = [markup.render_figure(drawn, "Copy rate")] if drawn else []
    return markup.render_folded_section(
        "copying", "Copy rate", intro, [*parts, markup.render_table(sheets.build_copy_rate_table(runs))]
    )


def _slices(runs: Sequence[RunReport]) -> str:
    intro = (
        "The same numbers for parts of the data; closed and open book on the questions that were answered both ways. "
        "Answer frequency: thirds of a run by how many passages of the corpus "
        "hold the answer; equal counts stay together, so a third can be empty."
    )
    parts = [markup.render_table(sheet) for sheet in sheets.build_run_slice_tables(runs)]
    nothing = [markup.render_remark("Nothing in these runs splits them: one data set, one language, one form.")]
    return markup.render_folded_section("slices", "Slices", intro, parts or nothing)


def _agreement(runs: Sequence[RunReport]) -> str:
    intro = (
        "The greedy answers graded anew by the string rules, against each other and against the judge's verdicts if "
        "the run has any. Kappa: agreement beyond chance."
    )
    return markup.render_folded_section(
        "agreement", "Agreement of graders", intro, [markup.render_table(sheets.build_agreement_table(runs))]
    )


def _extremes(runs: Sequence[RunReport], name: str) -> str:
    intro = "Up to twenty per run, by the change of mastery from closed to open book, then by benefit."
    parts = []
    for run in runs:
        questions = [render_extreme_question(row) for row in getattr(run.boundary, name)]
        none = f"none was {name}" if run.boundary.counts.with_open else sheets.NO_OPEN_ANSWERS
        parts += [f"<h3>{escape_html(run.name)}</h3>", *(questions or [markup.render_remark(f"{none}.")])]
    return markup.render_section(name, f"Most {name} questions", intro, parts)


SMALL_WIDTH, SMALL_HEIGHT = 560, 360  # of a small picture
SIDE_STYLES = {"closed": ("closed book", "kgrey"), "open": ("open book", "k0"), "mask": ("MASK", "k4")}
EFFECT_STYLES = {"beneficial": "k0", "neutral": "kgrey", "harmful": "k1"}
KNOWLEDGE_PARTS = {
    "known": ("knows it, and passages do no harm", "k2"),
    "harmed": ("knows it, but passages spoil the answer", "k1"),
    "helped": ("does not know it, passages help", "k0"),
    "hopeless": ("does not know it, passages do not help", "kgrey"),
}


def draw_knowledge_chart(runs: Sequence[RunReport]) -> str:
    """Each run's questions in four parts: known or not, helped by passages or not. The one picture of the report."""
    groups = [
        BarGroup(run.name, [_part_bar(name, share) for name, share in compute_knowledge_shares(run).items()])
        for run in runs
    ]
    about = "; ".join(f"{group.name}: {', '.join(bar.says for bar in group.bars)}" for group in groups)
    field = PlotArea(Axis(""), Axis("share of questions"))
    drawn = draw_bar_chart(field, groups, "What the LLM knows", about, is_stacked=True)
    return drawn + build_color_key(list(KNOWLEDGE_PARTS.values()))


def compute_knowledge_shares(run: RunReport) -> dict[str, float]:
    """Shares of the questions; without open-book answers only known and not known."""
    found, benefit = run.boundary.accuracy, run.boundary.benefit
    n = benefit.helps + benefit.neutral + benefit.hurts
    if not n:
        known = found.closed.value
        return {} if known is None else {"known": known, "hopeless": 1 - known}
    both = max(0, found.open.hits - benefit.helps)  # right with and without passages
    counts = {"known": both, "harmed": benefit.hurts, "helped": benefit.helps, "hopeless": benefit.neutral - both}
    return {name: max(0, count) / n for name, count in counts.items()}


def _part_bar(name: str, share: float) -> Bar:
    words, style = KNOWLEDGE_PARTS[name]
    return Bar(share, style, f"{words}: {format_percent(share)}", label=format_percent(share))


def draw_accuracy_chart(runs: Sequence[RunReport]) -> str:
    """Bars per run with intervals (the paper's Figure 1)."""
    used = [side for side in SIDE_STYLES if any(getattr(run.boundary.accuracy, side).n for run in runs)]
    groups = [BarGroup(run.name, [_bar(*SIDE_STYLES[side], _share(run, side)) for side in used]) for run in runs]
    return _grouped(groups, "Accuracy", "accuracy") + build_color_key([SIDE_STYLES[side] for side in used])


def _share(run: RunReport, side: str) -> Proportion:
    return get_matched_accuracy(run) if side == "closed" else getattr(run.boundary.accuracy, side)


def draw_copy_rate_chart(runs: Sequence[RunReport]) -> str:
    """MASK among answers with certainty 1, per run (the paper's Figure 2); nothing when no run has any."""
    masked = [run for run in runs if run.boundary.copying and run.boundary.copying.is_mask.n]
    kinds = {"is_mask": ("answer is MASK", "k4"), "says_mask": ("answer holds MASK", "k1")}
    groups = [
        BarGroup(run.name, [_bar(*kinds[part], getattr(run.boundary.copying, part)) for part in kinds])
        for run in masked
    ]
    return _grouped(groups, "Copy rate", "share of answers") + build_color_key(list(kinds.values())) if groups else ""


def _grouped(groups: Sequence[BarGroup], title: str, axis: str) -> str:
    about = "; ".join(f"{group.name}, {bar.says}" for group in groups for bar in group.bars)
    return draw_bar_chart(PlotArea(Axis(""), Axis(axis)), groups, title, about)


def _bar(name: str, style: str, share: Proportion) -> Bar:
    says = f"{name}: {format_percent(share.value)}, n = {share.n}"
    return Bar(share.value, style, says, share.low, share.high, format_percent(share.value) if share.n else "")


def draw_effect_chart(run: RunReport, indicator: str, side: str = "closed") -> str:
    """Stacked shares per interval (a panel of the paper's Figure 3)."""
    groups = [
        BarGroup(
            format_interval(item),
            [_effect(item, name) for name in EFFECT_STYLES],
            f"n = {item.n}" if item.n else "empty",
        )
        for item in get_effect_intervals(run, indicator, side)
    ]
    field = PlotArea(
        Axis(f"{PANEL_NAMES[side]} {indicator}"), Axis("share of questions"), width=SMALL_WIDTH, height=SMALL_HEIGHT
    )
    about = "; ".join(f"{group.name}, {bar.says}" for group in groups for bar in group.bars)
    title = f"Effect of retrieval by {PANEL_NAMES[side]} {indicator}"
    return draw_bar_chart(field, groups, title, about, is_stacked=True) + build_color_key(list(EFFECT_STYLES.items()))


def _effect(item: EffectInterval, name: str) -> Bar:
    count = int(getattr(item, name))
    return Bar(count / item.n if item.n else None, EFFECT_STYLES[name], f"{name}: {count}")


def draw_saving_chart(runs: Sequence[RunReport], indicator: str) -> str:
    """Accuracy kept against retrieval saved, a line per run and its matched random; nothing when no run has both."""
    found = [(run, saving) for run in runs if (saving := run.boundary.savings[indicator]) is not None]
    if not found:
        return ""
    lines: list[PlotLine] = []
    for number, (run, saving) in enumerate(found):
        lines.append(
            PlotLine(run.name, [Place(point.saved, point.accuracy) for point in saving.points], pick_line_style(number))
        )
        ends = [Place(0, saving.always), Place(1, saving.never)]
        lines.append(PlotLine(f"{run.name}, at random", ends, f"k{number % 7} d2"))
    heights = [point.y for line in lines for point in line.points]
    field = PlotArea(Axis("searches saved"), fit_axis("accuracy", heights), width=SMALL_WIDTH, height=SMALL_HEIGHT)
    about = "; ".join(
        f"{run.name}: {format_percent(saving.always)} right with every search, {format_percent(saving.never)} with none"
        for run, saving in found
    )
    return draw_line_plot(field, lines, f"Skipping by {indicator}", about)
