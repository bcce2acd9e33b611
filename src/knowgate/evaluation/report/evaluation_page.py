"""An evaluation as one HTML file: the verdict and one chart first, then the evidence, details collapsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from knowgate.core.display import UNKNOWN_AMOUNT, TextTable, format_percent
from knowgate.core.files import write_text
from knowgate.evaluation import recommendation
from knowgate.evaluation.cost import SAVINGS_QUESTIONS, CostAssumptions, describe_prices, format_money, format_price
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.post_retrieval import build_cascade_table, build_second_look_table
from knowgate.evaluation.report import evaluation_charts as charts
from knowgate.evaluation.report import evaluation_tables as tables
from knowgate.evaluation.report import html
from knowgate.evaluation.report.evaluation_charts import HighlightedPolicy
from knowgate.evaluation.report.evaluation_verdict import EvaluationVerdict, build_verdict
from knowgate.evaluation.retrieval_actions import build_action_table
from knowgate.stats.bootstrap import estimate_mean
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import format_points_estimate
from knowgate.training.topics import build_topic_table
from knowgate.types.markup import escape_html

MAX_CHARTED_GATES = 4  # gates with charts of calibration and needs
MAX_ROC_CURVES = 5
MIN_SLICE_QUESTIONS = 10
EXAMPLES_PER_KIND = 5
RECOMMENDATION_LIMITS = {
    "folds": recommendation.FOLDS,
    "agreeing": recommendation.MIN_AGREEING_FOLDS,
    "questions": recommendation.MIN_QUESTIONS,
    "slice_rows": recommendation.MIN_SLICE_ROWS,
    "skipped": 100 * recommendation.MIN_SKIPPED,
    "z": recommendation.Z_CERTAIN,
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
    n = len(evaluation.table.rows)
    subtitle = f"{evaluation.table.settings['model']}, {n:,} question{'s' if n != 1 else ''}"
    sections = list(build_evaluation_sections(evaluation, assumptions or CostAssumptions(), max_loss))
    write_text(out, html.render_page("Which gate to use", subtitle, sections))


def build_evaluation_sections(
    evaluation: Evaluation, assumptions: CostAssumptions, max_loss: float = recommendation.MAX_LOSS
) -> Iterator[str]:
    """Build the sections of the HTML report of an evaluation: the verdict and a chart first, then the details.

    Args:
        evaluation: Evaluated gates.
        assumptions: Prices and times for savings.
        max_loss: Share of the answers that skipping searches may cost.
    """
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
    if evaluation.topics:
        intro = "What the LLM knows of each topic, and what passages change; 95 % intervals in brackets."
        topics = html.render_table(build_topic_table(evaluation.topics))
        yield html.render_section("topics", "By topic", intro, [topics])
    if evaluation.cascade:
        intro = (
            "After retrieval, an arbiter chooses between the answers with and without passages. Each row is a gate "
            "at its own threshold, followed by the arbiter. The row 'always' is the arbiter alone."
        )
        table = _render_table(build_cascade_table(evaluation.cascade))
        yield html.render_section("arbiter", "With an arbiter behind the gate", intro, [table])
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
    """Build the section on money and latency; rows with unknown amounts are collapsed."""
    intro = (
        f"Of {policy.name}, at {describe_prices(assumptions)} and {assumptions.search_seconds:g} s a search. Searches, LLM "
        f"calls and generated tokens are counted in the rows. Prices and seconds are options. "
        f"{verdict.not_counted} {_describe_break_even(verdict, assumptions)}".rstrip()
    )
    table = _build_cost_table(verdict, assumptions)
    known = tuple(row for row in table.rows if UNKNOWN_AMOUNT not in row)
    unknown = tuple(row for row in table.rows if UNKNOWN_AMOUNT in row)
    parts = [html.render_table(replace(table, rows=known))]
    if unknown:
        remarks = "".join(map(html.render_remark, _explain_unknown_rows(verdict)))
        content = remarks + html.render_table(replace(table, title="", rows=unknown))
        parts.append(f'<details class="more"><summary>What is not known ({len(unknown)})</summary>{content}</details>')
    return html.render_section("money", "Money and latency", intro, parts)


def _explain_unknown_rows(verdict: EvaluationVerdict) -> Iterator[str]:
    """Say why rows of the cost table are unknown."""
    savings = verdict.savings
    if savings.always.prompt is None:
        yield "The rows hold no passages, so the tokens of reading them are unknown."
    if savings.always.completion is None:
        yield "The rows hold no texts of answers, so the tokens of writing them are unknown."
    if savings.gated.decision_seconds is None:
        yield "The gate was not timed, so its seconds are unknown."


def _build_cost_table(verdict: EvaluationVerdict, assumptions: CostAssumptions) -> TextTable:
    """Build the table of what always, never and gated retrieval cost, and what the gate saves."""
    policies = (verdict.savings.always, verdict.never, verdict.savings.gated)
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
            [cost.seconds(assumptions) for cost in policies],
            lambda seconds: f"{seconds / SAVINGS_QUESTIONS:.3f}",  # of one question, unlike the other rows
        ),
    )
    columns = ("", "always retrieve", "never", "with the gate", "the gate saves")
    return TextTable(f"On {SAVINGS_QUESTIONS:,} questions", columns, rows)


def _make_cost_row(
    name: str, amounts: Sequence[float | None], format_amount: Callable[[float], str] = "{:,.0f}".format
) -> tuple[str, ...]:
    """Make a row of the cost table: the amounts of always, never and gated retrieval, and what the gate saves.

    Args:
        name: Name of the row.
        amounts: Amounts per question of always, never and gated retrieval; None if unknown.
        format_amount: Formats the amount of `SAVINGS_QUESTIONS` questions.
    """
    always, _, gated = amounts
    saved = None if always is None or gated is None else always - gated
    totals = [None if amount is None else SAVINGS_QUESTIONS * amount for amount in (*amounts, saved)]
    return (name, *(UNKNOWN_AMOUNT if total is None else format_amount(total) for total in totals))


def _describe_break_even(verdict: EvaluationVerdict, assumptions: CostAssumptions) -> str:
    """Say at which price of an LLM call or of a search the gate becomes cheaper; '' if unknown."""
    savings = verdict.savings
    if savings.money is None:
        return f"It is cheaper than always retrieving if an LLM call costs less than {format_price(savings.break_even_call)}."
    price = savings.gated.break_even(savings.always, assumptions.prices)
    if price is None:
        return ""
    if price == 0:
        return "It is cheaper than always retrieving whatever a search costs."
    return f"It is cheaper than always retrieving if a search costs more than {format_price(price)}."


# --- details of the policy ------------------------------------------------------------------------


def _build_policy_slice_section(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    """Build the section on how a gate and threshold change the accuracy in each group of questions, such as a language."""
    title = "Where it helps and hurts"
    intro = (
        f"How skipping searches with {policy.name} changes accuracy in each part of the questions, including those it "
        "was chosen on. Left of the line, answers are lost."
    )
    slices = charts.slice_policy(evaluation, policy, MIN_SLICE_QUESTIONS)
    if not slices:
        return html.render_section("where", title, intro, [html.render_remark("All questions are of one kind.")])
    columns: dict[str, Callable[[charts.PolicySlice], str]] = {
        "part": lambda part: part.name,
        "n": lambda part: str(part.n),
        "searches skipped": lambda part: format_percent(part.skipped),
        "accuracy, always": lambda part: format_percent(part.always),
        "change in points": lambda part: format_points_estimate(estimate_mean(part.changes, evaluation.resamples)),
    }
    chart = charts.draw_slice_chart(slices, evaluation.resamples)
    figure = html.render_figure(chart, "Change against always retrieving")
    table = html.render_table(TextTable.build("By part", slices, columns))
    return html.render_section("where", title, intro, [figure, table])


@dataclass(frozen=True)
class DecisionKind:
    """A kind of decision of which the report shows examples, such as skips that were right.

    Attributes:
        title: Heading of the examples.
        is_good: Whether the decision was right.
        rows: Mask of the questions with this kind of decision.
        lowest_need_first: Whether the examples are the questions of lowest need (0 to 1), or those of highest.
    """

    title: str
    is_good: bool
    rows: BoolArray
    lowest_need_first: bool


def classify_decisions(evaluation: Evaluation, policy: HighlightedPolicy) -> list[DecisionKind]:
    """Divide decisions into good and bad skips, and searches that helped and harmed."""
    closed, opened, skips = evaluation.table.closed_right, evaluation.table.always_right, policy.skips
    # The surest skips are those of lowest need, the surest searches those of highest need.
    skip = partial(DecisionKind, lowest_need_first=True)
    search = partial(DecisionKind, lowest_need_first=False)
    return [
        skip("Good skips: right without a search", is_good=True, rows=skips & closed),
        skip("Bad skips: right only with a search", is_good=False, rows=skips & opened & ~closed),
        search("Saved by retrieval: wrong without it", is_good=True, rows=~skips & opened & ~closed),
        search("Harmed by retrieval: right without it", is_good=False, rows=~skips & closed & ~opened),
    ]


def _build_examples_section(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    """Build the section with examples of good and bad decisions."""
    intro = f"Decisions that {policy.name} was most certain of, with the need for retrieval. Click to open."
    if not evaluation.table.has_text.any():
        intro += " This run holds no question texts, so ids are shown."
    return html.render_section("examples", "Decisions to look at", intro, list(render_examples(evaluation, policy)))


def render_examples(evaluation: Evaluation, policy: HighlightedPolicy) -> Iterator[str]:
    """Render examples of each kind of decision, those that the gate was surest of."""
    needs, n = policy.gate.needs, len(policy.skips)
    for kind in classify_decisions(evaluation, policy):
        yield f"<h3>{escape_html(kind.title)} ({int(kind.rows.sum())} of {n})</h3>"
        order = np.argsort(needs if kind.lowest_need_first else -needs, kind="stable")
        examples = [int(row) for row in order if kind.rows[row]][:EXAMPLES_PER_KIND]
        for row in examples:
            css_class = "helped" if kind.is_good else "harmed"
            mark = f'<span class="change {css_class}">{needs[row]:.2f}</span>'
            decision = "skipped" if policy.skips[row] else "retrieved for"
            yield html.render_question(evaluation.table.rows[row], mark, f"need {needs[row]:.3f}, {decision}")
        if not examples:
            yield html.render_remark("None.")


# --- collapsed sections ---------------------------------------------------------------------------


def _build_folded_sections(evaluation: Evaluation, policy: HighlightedPolicy | None) -> Iterator[str]:
    """Build the sections with details, which are collapsed at first."""
    highlighted = [policy.gate.gate] if policy else []
    full_table = tables.build_full_table(evaluation)
    yield html.render_folded_section(
        "gates",
        "All gates, all numbers",
        "Click a column header to sort; 95 % intervals in brackets.",
        [html.render_wide_table(full_table, tables.COLUMN_DEFINITIONS, highlighted)],
        f"{len(evaluation.gates)} rows, each gate at its own threshold",
    )
    yield _build_ranking_section(evaluation, policy)
    if evaluation.has_open_answers:
        yield _build_test_section(evaluation)
        yield _build_slice_section(evaluation)
    yield _build_data_section(evaluation)
    yield _build_definition_section()


def _build_ranking_section(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    """Build the section on how well needs (scores from 0 to 1) predict what the LLM does not know; '' without gates."""
    intro = "How well the need score predicts what the LLM does not know, and whether it is a calibrated probability."
    gates = _order_by_auroc(evaluation, policy)
    if not gates:
        return ""
    roc = charts.draw_roc_chart(evaluation, gates[:MAX_ROC_CURVES])
    figures = [html.render_figure(roc, "ROC curves, with AUROC")]
    for gate in gates[:MAX_CHARTED_GATES]:
        calibration = charts.draw_reliability_chart(evaluation, gate)
        figures.append(html.render_figure(calibration, f"Calibration: {gate.gate}"))
        figures.append(html.render_figure(charts.draw_need_histogram(evaluation, gate), f"Needs: {gate.gate}"))
    hint = f"{min(MAX_CHARTED_GATES, len(gates))} gates, the best by AUROC among them"
    return html.render_folded_section("ranking", "Calibration and ROC", intro, [html.render_pair(figures)], hint)


def _order_by_auroc(evaluation: Evaluation, policy: HighlightedPolicy | None) -> list[GateResult]:
    """Return the highlighted gate, followed by the others in descending order of AUROC."""
    first = [policy.gate] if policy else []
    ordered = sorted(charts.rank_gates(evaluation), key=lambda gate: -(gate.measures["auroc"].value or 0.0))
    return first + [gate for gate in ordered if gate not in first]


def _build_test_section(evaluation: Evaluation) -> str:
    """Build the section with paired tests, tuned thresholds, and checks after retrieval if any."""
    intro = "Each gate against always retrieving, and the most accurate gate against the others, on the same questions."
    parts = [tables.build_comparison_table(evaluation), tables.build_frontier_table(evaluation)]
    if evaluation.second_looks:
        parts.append(build_second_look_table(evaluation.second_looks))
    if evaluation.actions:
        parts.append(build_action_table(evaluation.actions))
    hint = "differences with p-values, rates, areas"
    return html.render_folded_section("compared", "Tests and thresholds", intro, list(map(_render_table, parts)), hint)


def _build_slice_section(evaluation: Evaluation) -> str:
    """Build the section with all gates on groups of questions; '' if there are no groups."""
    parts = [_render_table(table) for table in tables.build_gate_slice_tables(evaluation)]
    if not parts:
        return ""
    intro = "Accuracy @ retrieval rate, and in brackets the gain over matched random in points."
    return html.render_folded_section("slices", "All gates by part", intro, parts)


def _build_data_section(evaluation: Evaluation) -> str:
    """Build the section that says which questions were evaluated, and how."""
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
    steps = [step.format(**RECOMMENDATION_LIMITS) for step in html.load_texts("recommendation")["steps"]]
    items = "".join(f"<li>{escape_html(step)}</li>" for step in steps)
    parts = [
        f'<h3 id="choosing">How a recommendation is chosen</h3><ol>{items}</ol>',
        html.render_definitions("Definitions", tables.COLUMN_DEFINITIONS),
    ]
    return html.render_folded_section("how", "How every number is computed", "What the column headers mean.", parts)


def _render_table(table: TextTable) -> str:
    """Render a table whose column heads link to their definitions."""
    return html.render_table(table, tables.COLUMN_DEFINITIONS)
