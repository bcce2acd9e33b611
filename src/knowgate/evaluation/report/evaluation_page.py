"""An evaluation as one HTML file: the verdict and one chart first, then the evidence, details collapsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from knowgate.core.display import UNKNOWN_AMOUNT, TextTable
from knowgate.core.files import write_text
from knowgate.evaluation import recommendation
from knowgate.evaluation.cost import SAVINGS_QUESTIONS, CostAssumptions, describe_prices, format_money
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.recommendation import SliceChange
from knowgate.evaluation.replay import PolicyCost
from knowgate.evaluation.report import evaluation_charts as charts
from knowgate.evaluation.report import evaluation_tables as tables
from knowgate.evaluation.report import html
from knowgate.evaluation.report.evaluation_charts import HighlightedPolicy
from knowgate.evaluation.report.evaluation_verdict import EvaluationVerdict, build_verdict
from knowgate.stats.proportions import format_points_estimate
from knowgate.types.markup import escape_html

MAX_CHARTED_GATES = 4  # gates with charts of calibration and needs
MIN_SLICE_QUESTIONS = 10
EXAMPLES_PER_KIND = 5
SLICE_CHANGE_COLUMNS: dict[str, Callable[[SliceChange], str]] = {
    "part": lambda part: part.name,
    "n": lambda part: str(part.n),
    "change in points": lambda part: format_points_estimate(part.change),
}


def write_evaluation_page(
    evaluation: Evaluation,
    out: Path,
    assumptions: CostAssumptions | None = None,
    max_loss: float = recommendation.MAX_LOSS,
) -> None:
    """Write the report of an evaluation as one HTML file.

    Args:
        evaluation: Evaluated gates.
        out: File to write.
        assumptions: Prices and times for savings.
        max_loss: Share of the answers that skipping searches may cost.
    """
    subtitle = f"{evaluation.table.settings['model']}, {len(evaluation.table.rows):,} questions"
    sections = list(_build_sections(evaluation, assumptions or CostAssumptions(), max_loss))
    write_text(out, html.render_page("Which gate to use", subtitle, sections))


def _build_sections(evaluation: Evaluation, assumptions: CostAssumptions, max_loss: float) -> Iterator[str]:
    """Build the sections of the evaluation report: verdict, chart, then details."""
    verdict = build_verdict(evaluation, assumptions, max_loss)
    policy = charts.select_policy(evaluation, verdict.recommendation)
    yield html.render_cautions(evaluation.table.list_caveats())
    yield _build_verdict_section(verdict)
    if evaluation.has_open_answers:
        yield _build_trade_off_section(evaluation, policy)
    if policy is not None:
        if verdict.recommendation.gate:
            yield _build_cost_section(verdict, policy, assumptions)
        yield _build_policy_slice_section(evaluation, policy)
        yield _build_examples_section(evaluation, policy)
    yield from _build_folded_sections(evaluation, policy)


def _build_verdict_section(verdict: EvaluationVerdict) -> str:
    """Build the section with the verdict in words and its key figures."""
    figures = "".join(
        f"<div><dt>{escape_html(figure.description)}</dt><dd>{escape_html(figure.value)}</dd></div>"
        for figure in verdict.key_figures
    )
    link = '<a href="#choosing">How it is chosen</a>'
    parts = [
        f'<p class="light">{escape_html(verdict.label)}</p>',
        f"<h2>{escape_html(verdict.headline)}</h2>",
        f'<dl class="tiles">{figures}</dl>' if figures else "",
        f"<p>{escape_html(' '.join(verdict.sentences))}</p>",
        f'<p class="note">{escape_html(verdict.note)} {link}</p>' if verdict.note else "",
    ]
    return f'<section class="verdict {verdict.level}" id="verdict">{"".join(parts)}</section>'


def _build_trade_off_section(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    """Build the section with the chart of accuracy against searches."""
    intro = (
        "Each line retrieves for the questions of highest need first: to the left fewer searches, upwards more right "
        "answers. A gate is worth something where it lies above the straight line, which retrieves at random."
    )
    if policy is not None:
        kind = "the choice above" if policy.is_recommended else "best found, not recommended"
        intro += f" The dot is {policy.name} ({kind}) on all questions, with its 95 % interval."
    figure = html.render_figure(charts.draw_trade_off_chart(evaluation, policy), "Accuracy against searches")
    return html.render_section("picture", "What skipping searches does to the answers", intro, [figure])


# --- cost -----------------------------------------------------------------------------------------


def _build_cost_section(verdict: EvaluationVerdict, policy: HighlightedPolicy, assumptions: CostAssumptions) -> str:
    """Build the section on money and latency."""
    intro = (
        f"Costs of {policy.name}, at {describe_prices(assumptions)} and {assumptions.search_seconds:g} s a search. Searches, "
        f"LLM calls and generated tokens are counted in the rows. Prices and seconds are options. {verdict.judge_note}".rstrip()
    )
    costs = verdict.costs
    amounts = (
        (costs.always.prompt, "The rows hold no passages, so the tokens of reading them are unknown."),
        (costs.always.completion, "The rows hold no texts of answers, so the tokens of writing them are unknown."),
        (costs.gated.decision_seconds, "The gate was not timed, so its seconds are unknown."),
    )
    remarks = [html.render_remark(remark_if_unknown) for amount, remark_if_unknown in amounts if amount is None]
    table = html.render_table(_build_cost_table(verdict, assumptions))
    return html.render_section("money", "Money and latency", intro, [table, *remarks])


def _build_cost_table(verdict: EvaluationVerdict, assumptions: CostAssumptions) -> TextTable:
    """Build the table of costs: always retrieving, never retrieving and using a gate."""
    policies = verdict.costs.policies.values()
    search_money = [cost.searches * assumptions.price_search for cost in policies]
    money = [cost.money(assumptions.prices) for cost in policies]
    rows = (
        _make_cost_row("searches", [cost.searches for cost in policies]),
        _make_cost_row("LLM calls", [cost.calls for cost in policies]),
        _make_cost_row("tokens of passages, estimated", [cost.prompt for cost in policies]),
        _make_cost_row("tokens generated, drafts included", [cost.completion for cost in policies]),
        _make_cost_row("price of the searches", search_money, format_money),
        _make_cost_row("price of searches and LLM", money, format_money),
        _make_cost_row(
            "seconds a question, searching and deciding",
            [_sum_seconds(cost, assumptions.search_seconds) for cost in policies],
            lambda total: f"{total / SAVINGS_QUESTIONS:.3f}",  # per question; all other rows are totals
        ),
    )
    columns = ("", "always retrieve", "never", "with the gate", "the gate saves")
    return TextTable(f"On {SAVINGS_QUESTIONS:,} questions", columns, rows)


def _sum_seconds(cost: PolicyCost, search_seconds: float) -> float | None:
    """Return the seconds of searching and deciding, without answering. None if not timed."""
    return None if cost.decision_seconds is None else cost.searches * search_seconds + cost.decision_seconds


def _make_cost_row(
    name: str, amounts: Sequence[float | None], format_amount: Callable[[float], str] = "{:,.0f}".format
) -> tuple[str, ...]:
    """Make a row of costs: always retrieving, never retrieving and using a gate, and the saving.

    Args:
        name: Name of the row.
        amounts: Amounts per question of always retrieving, never retrieving and using a gate; None if unknown.
        format_amount: Formats the total amount of `SAVINGS_QUESTIONS` questions.
    """
    always, _, gated = amounts
    saved = None if always is None or gated is None else always - gated
    totals = [None if amount is None else SAVINGS_QUESTIONS * amount for amount in (*amounts, saved)]
    cells = [UNKNOWN_AMOUNT if total is None else format_amount(total) for total in totals]
    return (name, *cells)


# --- details of the policy ------------------------------------------------------------------------


def _build_policy_slice_section(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    """Build the section on the accuracy change in each group of questions, such as a language."""
    intro = (
        f"How skipping searches with {policy.name} changes accuracy in each part of the questions, including those it "
        "was chosen on. Below 0, answers are lost."
    )
    changes = policy.right.astype(float) - evaluation.table.retrieved_right
    slices = recommendation.measure_slice_changes(evaluation, changes, MIN_SLICE_QUESTIONS)
    content = html.render_remark("All questions are of one kind.")
    if slices:
        table = TextTable.build("Accuracy against always retrieving, by part", slices, SLICE_CHANGE_COLUMNS)
        content = html.render_table(table)
    return html.render_section("where", "Where it helps and hurts", intro, [content])


def _build_examples_section(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    """Build the section with good and bad decisions. The surest decisions of the gate come first."""
    intro = f"Decisions that {policy.name} was most certain of, with the need for retrieval. Click to open."
    if not evaluation.table.has_text.any():
        intro += f" {html.NO_QUESTION_TEXTS}"
    closed_book_right, open_book_right = evaluation.table.closed_book_right, evaluation.table.retrieved_right
    skips = policy.skips
    kinds = {
        "Good skips: right without a search": skips & closed_book_right,
        "Bad skips: right only with a search": skips & open_book_right & ~closed_book_right,
        "Saved by retrieval: wrong without it": ~skips & open_book_right & ~closed_book_right,
        "Harmed by retrieval: right without it": ~skips & closed_book_right & ~open_book_right,
    }
    # The surest skips are those of lowest need, the surest searches those of highest need.
    surest_first = np.argsort(np.where(skips, policy.gate.needs, -policy.gate.needs), kind="stable")
    parts = []
    for title, is_of_kind in kinds.items():
        parts.append(f"<h3>{escape_html(title)} ({int(is_of_kind.sum())} of {len(skips)})</h3>")
        examples = [int(row) for row in surest_first if is_of_kind[row]][:EXAMPLES_PER_KIND]
        parts += [_render_example(evaluation, policy, row) for row in examples] or [html.render_remark("None.")]
    return html.render_section("examples", "Decisions to look at", intro, parts)


def _render_example(evaluation: Evaluation, policy: HighlightedPolicy, row: int) -> str:
    """Render a question with its need and decision. The color says whether the final answer is right."""
    table, need = evaluation.table, policy.gate.needs[row]
    if policy.skips[row]:
        decision, is_right = "skipped", table.closed_book_right[row]
    else:
        decision, is_right = "retrieved for", table.retrieved_right[row]
    css_class = "helped" if is_right else "harmed"
    mark = f'<span class="change {css_class}">{need:.2f}</span>'
    return html.render_question(table.rows[row], mark, f"need {need:.3f}, {decision}")


# --- collapsed sections ---------------------------------------------------------------------------


def _build_folded_sections(evaluation: Evaluation, policy: HighlightedPolicy | None) -> Iterator[str]:
    """Build the sections with details, which are collapsed at first."""
    highlighted = [policy.gate.gate] if policy else []
    full_table = tables.build_full_table(evaluation)
    intro = "Click a column header to sort; 95 % intervals in brackets."
    content = html.render_table(full_table, tables.COLUMN_DEFINITIONS, "sortable wide", highlighted)
    hint = f"{len(evaluation.gates)} rows, each gate at its own threshold"
    yield html.render_folded_section("gates", "All gates, all numbers", intro, [content], hint)
    yield _build_calibration_section(evaluation, policy)
    if evaluation.has_open_answers:
        title = "Pairs of gates, arbiter, parts and topics"
        intro = "Accuracy @ retrieval rate. In brackets: how many points it is above random retrieval at that rate."
        detail_tables = tables.build_detail_tables(evaluation)
        parts = [html.render_table(table, tables.COLUMN_DEFINITIONS) for table in detail_tables]
        yield html.render_folded_section("details", title, intro, parts)
    yield _build_data_section(evaluation)
    yield _build_definition_section()


def _build_calibration_section(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    """Build the section on calibration: whether needs are true probabilities."""
    intro = "Whether the need score is a calibrated probability that the LLM does not know the answer."
    highlighted = [policy.gate] if policy else []
    others = [gate for gate in charts.rank_gates(evaluation) if gate not in highlighted]
    gates = [*highlighted, *others][:MAX_CHARTED_GATES]
    if not gates:
        return ""
    figures = []
    for gate in gates:
        calibration = charts.draw_reliability_chart(evaluation, gate)
        histogram = charts.draw_need_histogram(evaluation, gate)
        figures.append(html.render_figure(calibration, f"Calibration: {gate.gate}"))
        figures.append(html.render_figure(histogram, f"Needs: {gate.gate}"))
    pairs = html.render_pair(figures)
    return html.render_folded_section("calibration", "Calibration", intro, [pairs], hint="the best gates")


def _build_data_section(evaluation: Evaluation) -> str:
    """Build the section on the evaluated questions and settings."""
    table = evaluation.table
    left_out = ", ".join(f"{count} {reason}" for reason, count in table.left_out.items() if count) or "none"
    rows = (
        ("model", str(table.settings["model"])),
        ("label runs", ", ".join(Path(run).name for run in table.runs)),
        ("questions", str(len(table.rows))),
        ("left out", left_out),
        ("nothing found, so answered closed-book either way", str(table.n_without_passages)),
        ("graded by", str(table.settings["grader"])),
        ("intervals", f"95 %, {evaluation.resamples} bootstrap resamples"),
    )
    intro = "Every gate decides on the same recorded questions; nothing was answered again for this page."
    content = html.render_table(TextTable("Data", ("", "value"), rows), css_class="text")
    return html.render_folded_section("about", "What was measured", intro, [content])


def _build_definition_section() -> str:
    """Build the section that defines every number and explains the recommendation."""
    # The texts contain names of constants in the module `recommendation`, such as {FOLDS}.
    steps = [step.format_map(vars(recommendation)) for step in html.load_texts("recommendation")["steps"]]
    items = "".join(f"<li>{escape_html(step)}</li>" for step in steps)
    parts = [
        f'<h3 id="choosing">How a recommendation is chosen</h3><ol>{items}</ol>',
        html.render_definitions(tables.COLUMN_DEFINITIONS),
    ]
    return html.render_folded_section("how", "How every number is computed", "What the column headers mean.", parts)
