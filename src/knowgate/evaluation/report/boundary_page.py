"""The knowledge boundary as one HTML file: a summary and a chart first, details collapsed below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from knowgate.core.chart import Axis, ChartPoint, fit_axis
from knowgate.core.display import format_percent
from knowgate.core.files import write_text
from knowgate.data.runs.columns import describe_synthetic
from knowgate.evaluation.boundary import EffectInterval, RunReport
from knowgate.evaluation.boundary_measures import INDICATORS, SavingCurve
from knowgate.evaluation.report import boundary_tables as tables
from knowgate.evaluation.report import charts, html
from knowgate.evaluation.report.charts import SMALL_HEIGHT, SMALL_WIDTH, Bar, BarGroup, PlotArea, PlotLine
from knowgate.stats.proportions import Proportion
from knowgate.types.markup import escape_html

SIDE_STYLES = {"closed": ("closed book", "kgrey"), "open": ("open book", "k0"), "mask": ("MASK", "k4")}
INTROS = html.load_texts("boundary")  # introductions of the sections
EFFECT_STYLES = {"beneficial": "k0", "neutral": "kgrey", "harmful": "k1"}
KNOWLEDGE_PARTS = {
    "known": ("knows it, and passages do no harm", "k2"),
    "harmed": ("knows it, but passages spoil the answer", "k1"),
    "helped": ("does not know it, passages help", "k0"),
    "hopeless": ("does not know it, passages do not help", "kgrey"),
}


def write_boundary_page(runs: Sequence[RunReport], out: Path) -> None:
    """Write the report of what LLMs know, measured on label runs, as one HTML file."""
    write_text(out, render_boundary_page(runs))


def render_boundary_page(runs: Sequence[RunReport]) -> str:
    """Render the report of what LLMs know, measured on label runs, as HTML."""
    names = ", ".join(run.name for run in runs)
    return html.render_page("What your LLM knows", names, build_boundary_sections(runs))


def build_boundary_sections(runs: Sequence[RunReport]) -> list[str]:
    """Build the HTML sections that show what LLMs know: warnings first, then a summary, charts, and all tables."""
    cautions = [describe_synthetic(run.boundary.counts.synthetic, run.boundary.counts.rows) for run in runs]
    shown = _list_shown_parts(runs)
    definitions = html.render_definitions({name: INTROS[name] for name in INTROS if shown.get(name, True)})
    all_tables = [html.render_table(table) for table in tables.build_boundary_tables(runs)]
    table_parts = [*all_tables, definitions]
    return [
        html.render_cautions([text for text in cautions if text]),
        _build_summary_section(runs),
        _build_accuracy_section(runs),
        _build_saving_section(runs) if shown["savings"] else "",
        *(_build_extremes_section(runs, name) for name in ("harmed", "helped")),
        _build_effect_section(runs) if shown["effects"] else "",
        html.render_folded_section("tables", "All tables", "What each table means is below.", table_parts),
    ]


def _list_shown_parts(runs: Sequence[RunReport]) -> dict[str, bool]:
    """Return whether the page shows each of its optional parts."""
    boundaries = [run.boundary for run in runs]
    # Two sections need samples, which imported answers lack. They are also shown to say that a run has no passages.
    any_lacks_passages = not all(boundary.counts.with_open for boundary in boundaries)
    savings = [boundary.savings[name] for boundary in boundaries for name in INDICATORS]
    return {
        "effects": any_lacks_passages or any(tables.has_effects(runs, side) for side in tables.SIDE_NAMES),
        "savings": any_lacks_passages or any(curve is not None for curve in savings),
        "mask": _has_masked_answers(runs),
        "copying": any(boundary.copying is not None for boundary in boundaries),
        "slices": bool(tables.build_run_slice_tables(runs)),
    }


def _build_summary_section(runs: Sequence[RunReport]) -> str:
    """Build the summary section with a text and a chart on the LLM's knowledge."""
    parts = []
    for run in runs:
        headline, *sentences = describe_boundary(run)
        parts.append(f"<h2>{html.render_text(headline)}</h2><p>{escape_html(' '.join(sentences))}</p>")
    if any(compute_knowledge_shares(run) for run in runs):
        parts.append(html.render_figure(draw_knowledge_chart(runs), "What the LLM knows, and what passages do"))
    return f'<section class="verdict unknown" id="known">{"".join(parts)}</section>'


def _build_accuracy_section(runs: Sequence[RunReport]) -> str:
    """Build the section with the accuracy without passages, with passages and with masked passages."""
    has_grades = any(run.boundary.accuracy.closed.n or run.boundary.accuracy.open.n for run in runs)
    figures = [html.render_figure(draw_accuracy_chart(runs), "Accuracy")] if has_grades else []
    table = html.render_table(tables.build_accuracy_table(runs))
    intro = f"{INTROS['accuracy']} {INTROS['mask']}" if _has_masked_answers(runs) else INTROS["accuracy"]
    return html.render_section("accuracy", "Accuracy", intro, [*figures, table])


def _has_masked_answers(runs: Sequence[RunReport]) -> bool:
    """Return whether any run has answers with masked passages."""
    return any(run.boundary.accuracy.mask.n for run in runs)


def _build_effect_section(runs: Sequence[RunReport]) -> str:
    """Build the section on the effect of retrieval, by mastery and certainty. Mastery is the share of right samples."""
    parts = [_draw_run_effects(run) for run in runs]
    return html.render_folded_section("effects", "Who is helped, who is harmed", INTROS["effects"], parts)


def _draw_run_effects(run: RunReport) -> str:
    """Draw the effect of retrieval by mastery and certainty, for one run. Certainty says how far the samples agree."""
    if not run.boundary.counts.with_open:
        return html.render_remark(f"{run.name}: {tables.NO_OPEN_ANSWERS}.")
    pairs = []
    sampled = [side for side in ("open", "mask") if tables.has_effects([run], side)]
    for side in ("closed", *sampled):
        title = f"{run.name}: effect by {tables.SIDE_NAMES[side]}"
        figures = [html.render_figure(draw_effect_chart(run, name, side), f"{title} {name}") for name in INDICATORS]
        pairs.append(html.render_pair(figures))
    return "".join(pairs)


def _build_saving_section(runs: Sequence[RunReport]) -> str:
    """Build the section on savings and losses of skipping questions with high mastery or certainty."""
    drawings = {name: draw_saving_chart(runs, name) for name in INDICATORS}
    figures = [html.render_figure(svg, f"Skipping by {name}") for name, svg in drawings.items() if svg]
    runs_without_passages = [run for run in runs if not run.boundary.counts.with_open]
    remarks = [html.render_remark(f"{run.name}: {tables.NO_OPEN_ANSWERS}.") for run in runs_without_passages]
    parts = [html.render_pair(figures), *remarks]
    return html.render_section("savings", "Retrieval saved, accuracy kept", INTROS["savings"], parts)


def _build_extremes_section(runs: Sequence[RunReport], name: str) -> str:
    """Build the section with the most harmed or most helped questions. `name` is 'harmed' or 'helped'."""
    intro = (
        "Up to twenty questions per run, ordered by how much passages change the share of right samples. For answers "
        "without samples, the change is +1 if passages turn the answer right, and -1 if they turn it wrong."
    )
    parts = []
    for run in runs:
        rows = getattr(run.boundary, name)
        parts.append(f"<h3>{escape_html(run.name)}</h3>")
        if not rows:
            reason = f"none was {name}" if run.boundary.counts.with_open else tables.NO_OPEN_ANSWERS
            parts.append(html.render_remark(f"{reason}."))
        elif not all(row.question for row in rows):
            parts.append(html.render_remark(html.NO_QUESTION_TEXTS))
        parts += [html.render_extreme_question(row) for row in rows]
    return html.render_section(name, f"Most {name} questions", intro, parts)


# --- the boundary in words ------------------------------------------------------------------------


def describe_boundary(run: RunReport) -> list[str]:
    """Describe what the LLM of a run knows, and what passages change.

    Returns:
        The headline, followed by sentences that explain it.
    """
    accuracy, counts = run.boundary.accuracy, run.boundary.counts
    if not accuracy.closed.n:
        return [
            f"What {run.name} knows cannot be said: none of its {counts.rows:,} answers is graded.",
            _describe_ungraded(run),
            'Give the questions gold answers, "answers": [...], and label again: knowgate label',
        ]
    sentences = [
        f"{run.name} knows {format_percent(accuracy.closed.value)} of these questions by itself.",
        f"Of {accuracy.closed.n:,} questions{_format_interval(accuracy.closed)}.",
        _describe_passages(run),
    ]
    if counts.rows > counts.failed + accuracy.closed.n:
        sentences.append(_describe_ungraded(run))
    return sentences


def _describe_ungraded(run: RunReport) -> str:
    """Say how many questions are not graded, or failed."""
    counts = run.boundary.counts
    ungraded = counts.rows - counts.failed - run.boundary.accuracy.closed.n
    return f"{ungraded:,} questions are not graded, {counts.failed:,} failed."


def _describe_passages(run: RunReport) -> str:
    """Describe the accuracy with passages, and the answers they turn right or wrong."""
    accuracy, benefit = run.boundary.accuracy, run.boundary.benefit
    if not accuracy.open.n:
        return "No question was answered with passages, so the effect of retrieval is unknown."
    n = benefit.helps + benefit.neutral + benefit.hurts
    is_subset = accuracy.open.n < accuracy.closed.n
    questions = f"{accuracy.open.n:,} questions that found passages" if is_subset else "same questions"
    # `accuracy.matched` is the accuracy without passages on the same questions.
    return (
        f"With passages it is right on {format_percent(accuracy.open.value)}{_format_interval(accuracy.open)} of the "
        f"{questions}, without them on {format_percent(accuracy.matched.value)}: they turn "
        f"{format_percent(benefit.helps / n)} of the answers right, spoil {format_percent(benefit.hurts / n)}, and change "
        f"nothing for {format_percent(benefit.neutral / n)}."
    )


def _format_interval(share: Proportion) -> str:
    """Format the interval of a share as an addition in parentheses; '' if there is none."""
    if share.low is None or share.high is None:
        return ""
    return f" (95 % interval {100 * share.low:.1f} to {100 * share.high:.1f})"


# --- charts ---------------------------------------------------------------------------------------


def draw_knowledge_chart(runs: Sequence[RunReport]) -> str:
    """Draw a stacked bar per run: known, harmed, helped and hopeless questions."""
    groups = []
    for run in runs:
        bars = []
        for name, share in compute_knowledge_shares(run).items():
            text, css_class = KNOWLEDGE_PARTS[name]
            bars.append(Bar(share, css_class, f"{text}: {format_percent(share)}", label=format_percent(share)))
        groups.append(BarGroup(run.name, bars))
    area = PlotArea(Axis(""), Axis("share of questions"))
    chart = charts.draw_bar_chart(area, groups, "What the LLM knows", is_stacked=True)
    return chart + charts.build_color_key(list(KNOWLEDGE_PARTS.values()))


def compute_knowledge_shares(run: RunReport) -> dict[str, float]:
    """Return the shares of known, harmed, helped and hopeless questions.

    Known: right both ways. Harmed: right only without passages. Helped: right only with passages. Hopeless: wrong both
    ways. Without answers with passages, questions are known (right) or hopeless (wrong). Empty without grades.
    """
    accuracy, benefit = run.boundary.accuracy, run.boundary.benefit
    n = benefit.helps + benefit.neutral + benefit.hurts
    if not n:
        known = accuracy.closed.value
        return {} if known is None else {"known": known, "hopeless": 1 - known}
    right_both_ways = max(0, accuracy.open.hits - benefit.helps)
    wrong_both_ways = max(0, benefit.neutral - right_both_ways)  # neutral questions have the same grade both ways
    counts = {"known": right_both_ways, "harmed": benefit.hurts, "helped": benefit.helps, "hopeless": wrong_both_ways}
    return {name: count / n for name, count in counts.items()}


def draw_accuracy_chart(runs: Sequence[RunReport]) -> str:
    """Draw the accuracy of each run without passages, with passages and with masked passages (KBM, Figure 1)."""
    sides = [side for side in SIDE_STYLES if any(getattr(run.boundary.accuracy, side).n for run in runs)]
    groups = []
    for run in runs:
        accuracy = run.boundary.accuracy
        # Only questions with both answers are compared.
        shares = {"closed": tables.get_closed_book_accuracy(run), "open": accuracy.open, "mask": accuracy.mask}
        groups.append(BarGroup(run.name, [_make_share_bar(*SIDE_STYLES[side], shares[side]) for side in sides]))
    key = charts.build_color_key([SIDE_STYLES[side] for side in sides])
    return charts.draw_bar_chart(PlotArea(Axis(""), Axis("accuracy")), groups, "Accuracy") + key


def _make_share_bar(name: str, css_class: str, share: Proportion) -> Bar:
    """Make the bar of a share, with its interval and a tooltip."""
    label = format_percent(share.value) if share.n else ""
    tooltip = f"{name}: {format_percent(share.value)}, n = {share.n}"
    return Bar(share.value, css_class, tooltip, share.low, share.high, label)


def draw_effect_chart(run: RunReport, indicator: str, side: str) -> str:
    """Draw how often retrieval helps and harms, as stacked bars, one per interval of an indicator.

    Args:
        run: The label run.
        indicator: 'mastery' (share of right samples) or 'certainty' (how far the samples agree).
        side: The answers on which the indicator is measured: 'closed' (without passages), 'open' (with passages) or
            'mask' (with masked passages).
    """
    groups = []
    for interval in run.boundary.effects[side][indicator]:
        bars = [_make_effect_bar(interval, effect) for effect in EFFECT_STYLES]
        note = f"n = {interval.n}" if interval.n else "empty"
        groups.append(BarGroup(tables.format_interval(interval), bars, note))
    name = f"{tables.SIDE_NAMES[side]} {indicator}"
    area = PlotArea(Axis(name), Axis("share of questions"), SMALL_WIDTH, SMALL_HEIGHT)
    title = f"Effect of retrieval by {name}"
    chart = charts.draw_bar_chart(area, groups, title, is_stacked=True)
    return chart + charts.build_color_key(list(EFFECT_STYLES.items()))


def _make_effect_bar(item: EffectInterval, effect: str) -> Bar:
    """Make the bar for one effect of retrieval, such as 'harmful', in an interval."""
    count = int(getattr(item, effect))
    share = count / item.n if item.n else None
    return Bar(share, EFFECT_STYLES[effect], f"{effect}: {count}")


def draw_saving_chart(runs: Sequence[RunReport], indicator: str) -> str:
    """Draw accuracy against saved searches, if the questions with the highest values of an indicator skip retrieval.

    The indicator is 'mastery' (share of right samples) or 'certainty' (how far they agree). Returns '' if no run has
    graded answers both with and without passages.
    """
    lines: list[PlotLine] = []
    descriptions: list[str] = []
    for run in runs:
        name, curve = run.name, run.boundary.savings[indicator]
        if curve is None:
            continue
        lines += _make_saving_lines(name, curve, number=len(descriptions))
        always, never = format_percent(curve.always), format_percent(curve.never)
        descriptions.append(f"{name}: {always} right with every search, {never} with none")
    if not lines:
        return ""
    accuracies = [point.y for line in lines for point in line.points]
    area = PlotArea(Axis("searches saved"), fit_axis("accuracy", accuracies), SMALL_WIDTH, SMALL_HEIGHT)
    return charts.draw_line_plot(area, lines, f"Skipping by {indicator}", "; ".join(descriptions))


def _make_saving_lines(name: str, curve: SavingCurve, number: int) -> list[PlotLine]:
    """Make the two lines of a run: its curve, and a straight line for random skips. `number` selects their color."""
    points = [ChartPoint(point.saved, point.accuracy) for point in curve.points]
    ends = [ChartPoint(0, curve.always), ChartPoint(1, curve.never)]
    dashed = f"k{number % charts.COLOR_COUNT} d2"  # CSS classes of the color and of dashes
    return [PlotLine(name, points, charts.pick_line_style(number)), PlotLine(f"{name}, at random", ends, dashed)]
