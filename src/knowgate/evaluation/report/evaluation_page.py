"""The evaluation as one HTML file: what to do first, one picture, then the evidence, the rest folded away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.core.files import write_text
from knowgate.data.runs.caveats import list_column_caveats
from knowgate.evaluation.cost import SAVINGS_QUESTIONS, CostAssumptions
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_results import GateResult
from knowgate.evaluation.post_retrieval import build_cascade_table, build_second_look_table
from knowgate.evaluation.recommendation import FOLDS, MAX_LOSS, MIN_QUESTIONS, MIN_SKIPPED, Z_CERTAIN
from knowgate.evaluation.report import evaluation_charts as charts
from knowgate.evaluation.report import evaluation_tables as sheets
from knowgate.evaluation.report import html as markup
from knowgate.evaluation.report.evaluation_charts import HighlightedPolicy, rank_gates, select_policy, slice_policy
from knowgate.evaluation.report.evaluation_verdict import EvaluationVerdict, build_verdict, format_money
from knowgate.evaluation.report.html import render_page, render_question
from knowgate.evaluation.retrieval_actions import build_action_table
from knowgate.stats.bootstrap import estimate_mean
from knowgate.stats.formats import format_points_estimate
from knowgate.stats.metrics import BoolArray
from knowgate.types.markup import escape_html

RECOMMENDATION_STEPS = (
    "A gate whose folder holds a guarantee that applies here (same LLM, wording, passages, answer length) is taken at "
    "its own threshold; of several, the one that skips most. Nothing is chosen by right and wrong, so all questions "
    "measure it.",
    "Else every gate is tried at every threshold, and doing without retrieval beside them. A skip wins where only the "
    "closed-book answer is right, and loses where only the open-book one is.",
    "A threshold will do if (wins - losses - 1) / n, less 1.645 standard errors, is above minus half of the loss that "
    "is accepted (--max-loss). Of those that will do, the one that skips most is taken.",
    f"To measure that choice, it is repeated {FOLDS} times without a fifth of the questions and tried on that fifth. "
    "Difference, gain and their intervals (bootstrap over questions, paired) come from these held-out fifths; they are "
    "those of the way of choosing, and a little pessimistic for the choice made on all questions.",
    "The gain is against skipping as many searches at random: what a gate must beat to be worth anything.",
    "'Worth using': the interval of the difference ends above minus the accepted loss, and the gain, with one loss "
    f"added, is more than {Z_CERTAIN} standard errors above 0. 'Worth a try': the estimates are above, but that is not "
    f"certain. 'Not worth it': the loss is larger, or fewer than {100 * MIN_SKIPPED:g} % of the searches are skipped, or the "
    "gain is not above 0, or answers are lost for certain and the gain might be 0. With fewer than "
    f"{MIN_QUESTIONS} different questions nothing is said.",
    "How often that is luck: with needs shuffled, so that no gate knew anything, 3 of 400 evaluations came out worth "
    "using and 108 as worth a try, so the latter is a hint and no more. A bootstrap interval of the gain above 0 would "
    "have let 32 through. The cutoff was picked on shuffles of four recorded runs, from three that were tried; these "
    "figures are of four other runs.",
)


EXAMPLES_PER_KIND = 5  # of four kinds


@dataclass(frozen=True)
class DecisionKind:
    """Decisions of one kind: which questions, how many, and whether those of least need are shown or of most."""

    title: str
    look: str
    rows: BoolArray
    by_least: bool


def classify_decisions(evaluation: Evaluation, policy: HighlightedPolicy) -> list[DecisionKind]:
    closed, opened, skips = evaluation.trial.closed_right, evaluation.trial.always_right, policy.skips
    return [
        DecisionKind("Good skips: right without a search", "right", skips & closed, by_least=True),
        DecisionKind(
            "Bad skips: only a search would have been right", "wrong", skips & opened & ~closed, by_least=True
        ),
        DecisionKind("Saved by retrieval: wrong without it", "right", ~skips & opened & ~closed, by_least=False),
        DecisionKind("Harmed by retrieval: right without it", "wrong", ~skips & closed & ~opened, by_least=False),
    ]


def render_examples(evaluation: Evaluation, policy: HighlightedPolicy) -> Iterator[str]:
    """Up to twenty questions, five of a kind, those the gate was surest of."""
    n = len(policy.skips)
    for kind in classify_decisions(evaluation, policy):
        count = int(kind.rows.sum())
        yield f"<h3>{escape_html(kind.title)} ({count} of {n})</h3>"
        order = np.argsort(policy.gate.needs if kind.by_least else -policy.gate.needs, kind="stable")
        chosen = [int(row) for row in order if kind.rows[row]][:EXAMPLES_PER_KIND]
        yield from (_example(evaluation, policy, row, kind) for row in chosen)
        if not chosen:
            yield markup.render_remark("None.")


def _example(evaluation: Evaluation, policy: HighlightedPolicy, number: int, kind: DecisionKind) -> str:
    row, need = evaluation.trial.rows[number], float(policy.gate.needs[number])
    mark = f'<span class="change {"helped" if kind.look == "right" else "harmed"}">{need:.2f}</span>'
    return render_question(row, mark, f"need {need:.3f}, {'skipped' if policy.skips[number] else 'retrieved for'}")


MAX_CHARTED_GATES = 4  # gates with pictures of calibration and needs of their own
MAX_ROC_CURVES = 5  # ROC curves in one picture
MIN_SLICE_QUESTIONS = 10  # questions of a part that is shown


def write_evaluation_page(
    evaluation: Evaluation, out: Path, *, assumed: CostAssumptions | None = None, max_loss: float = MAX_LOSS
) -> None:
    """assumed: prices, for what is saved. max_loss: share of the answers that fewer searches may cost."""
    n = len(evaluation.trial.rows)
    about = f"{evaluation.trial.settings['model']}, {n:,} question{'s' if n != 1 else ''}"
    parts = list(build_evaluation_sections(evaluation, assumed or CostAssumptions(), max_loss))
    write_text(out, render_page("Which gate to use", about, parts))


def build_evaluation_sections(
    evaluation: Evaluation, assumed: CostAssumptions, max_loss: float = MAX_LOSS
) -> Iterator[str]:
    said = build_verdict(evaluation, assumed, max_loss)
    policy = select_policy(evaluation, said.advice)
    yield markup.render_cautions(list_column_caveats(evaluation.trial))
    yield _verdict(said)
    if evaluation.trial.open_right is not None:
        yield _picture(evaluation, policy)
    if policy is not None:
        yield _spending(said, policy, assumed) if said.advice.gate else ""
        yield _where(evaluation, policy)
        yield _examples(evaluation, policy)
    yield _arbiter(evaluation)
    yield from _folded(evaluation, policy)


def _verdict(said: EvaluationVerdict) -> str:
    tiles = "".join(
        f"<div><dt>{escape_html(tile.about)}</dt><dd>{escape_html(tile.value)}</dd></div>" for tile in said.tiles
    )
    parts = [
        f'<p class="light">{escape_html(said.label)}</p>',
        f"<h2>{escape_html(said.headline)}</h2>",
        f'<dl class="tiles">{tiles}</dl>' if tiles else "",
        f"<p>{escape_html(' '.join(said.sentences))}</p>",
        f'<p class="note">{escape_html(said.note)} <a href="#choosing">How it is chosen</a></p>' if said.note else "",
    ]
    return f'<section class="verdict {said.advice.light}" id="verdict">{"".join(parts)}</section>'


def _picture(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    intro = (
        "Each line retrieves for the questions of highest need first: to the left fewer searches, upwards more right "
        "answers. A gate is worth something where it lies above the straight line, which retrieves at random."
    )
    if policy is not None:
        kind = "recommended" if policy.is_recommended else "best found, not recommended"
        intro += f" The dot is {policy.name} ({kind}), with its 95 % interval."
    drawn = markup.render_figure(charts.draw_trade_off_chart(evaluation, policy), "Accuracy against searches")
    return markup.render_section("picture", "What skipping searches does to the answers", intro, [drawn])


def _spending(said: EvaluationVerdict, policy: HighlightedPolicy, assumed: CostAssumptions) -> str:
    intro = (
        f"Of {policy.name}. Searches and generated tokens are counted in the rows; a search is taken to cost "
        f"{assumed.price_search:g} and {assumed.search_seconds:g} s, a million tokens {1e6 * assumed.price_token:g}"
        f"{' (US dollars)' if assumed == CostAssumptions() else ''}: set --price-search, --price-token and --search-seconds to "
        f"yours. {_break_even(said, assumed)}".rstrip()
    )
    remarks = []
    if said.always.read is None:
        remarks.append(
            markup.render_remark("The rows hold no passages, so the tokens that reading them takes are left out.")
        )
    if said.always.written is None:
        remarks.append(
            markup.render_remark("The rows hold no texts of answers, so the tokens of writing them are left out.")
        )
    if said.gated.decision is None:
        remarks.append(markup.render_remark("The gate was not timed here; seconds are those of searching alone."))
    return markup.render_section(
        "money", "Money and latency", intro, [markup.render_table(_spent(said, assumed)), *remarks]
    )


def _spent(said: EvaluationVerdict, assumed: CostAssumptions) -> TextTable:
    ways = (said.always, said.never, said.gated)
    money = [spent.money(assumed) for spent in ways]
    money.append(money[0] - money[-1])
    rows = (
        _row("searches", *(SAVINGS_QUESTIONS * spent.searches for spent in ways)),
        _row("tokens of passages, estimated", *(_times(spent.read) for spent in ways)),
        _row("tokens generated, drafts included", *(_times(spent.written) for spent in ways)),
        ("money", *(format_money(SAVINGS_QUESTIONS * amount, assumed) for amount in money)),
        ("money for 1,000 questions", *(format_money(1_000 * amount, assumed) for amount in money)),
        _row("seconds a question, searching and deciding", *(spent.seconds(assumed) for spent in ways), show="{:.3f}"),
    )
    return TextTable(
        f"On {SAVINGS_QUESTIONS:,} questions", ("", "always retrieve", "never", "with the gate", "the gate saves"), rows
    )


def _break_even(said: EvaluationVerdict, assumed: CostAssumptions) -> str:
    """From which price of a search on the gate is cheaper than always retrieving."""
    price = said.gated.break_even(said.always, assumed)
    if price is None:
        return ""
    if price == 0:
        return "It is cheaper than always retrieving whatever a search costs."
    return f"It is cheaper than always retrieving where a search costs more than {price:.3g}."


def _row(name: str, *amounts: float | None, show: str = "{:,.0f}") -> tuple[str, ...]:
    """always, never and gated, and what is saved between the first and the last."""
    known = [amount for amount in amounts if amount is not None]
    if len(known) < len(amounts):
        return (name, *[MISSING_VALUE] * (len(amounts) + 1))
    return (name, *(show.format(value) for value in (*known, known[0] - known[-1])))


def _times(tokens: float | None) -> float | None:
    return None if tokens is None else SAVINGS_QUESTIONS * tokens


def _where(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    found = slice_policy(evaluation, policy, MIN_SLICE_QUESTIONS)
    intro = (
        f"Of {policy.name}: what its skips change in each part of all questions, those it was chosen on included. Left "
        "of the line answers are lost."
    )
    if not found:
        return markup.render_section(
            "where", "Where it helps and hurts", intro, [markup.render_remark("All questions are of one kind.")]
        )
    rows = tuple(
        (part.name, str(part.n), format_percent(part.skipped), format_percent(part.always),
         format_points_estimate(estimate_mean(part.changes, evaluation.resamples)))
        for part in found
    )  # fmt: skip
    columns = ("part", "n", "searches skipped", "accuracy, always", "change in points")
    drawn = markup.render_figure(
        charts.draw_slice_chart(found, evaluation.resamples), "Change against always retrieving"
    )
    parts = [drawn, markup.render_table(TextTable("By part", columns, rows))]
    return markup.render_section("where", "Where it helps and hurts", intro, parts)


def _arbiter(evaluation: Evaluation) -> str:
    if evaluation.cascade is None:
        return ""
    intro = (
        "After retrieval an arbiter chooses between the answer with passages and the one from memory: each gate, at "
        "its own threshold, with the arbiter behind it. The row 'always' is the arbiter alone."
    )
    table = _table(build_cascade_table(evaluation.cascade))
    return markup.render_section("arbiter", "With an arbiter behind the gate", intro, [table])


def _examples(evaluation: Evaluation, policy: HighlightedPolicy) -> str:
    intro = f"Of {policy.name}, those it was surest of; the number is the need. They open on a click."
    if not evaluation.trial.has_text.any():
        intro += " This run holds no question texts, so ids stand for them."
    return markup.render_section("examples", "Decisions to look at", intro, list(render_examples(evaluation, policy)))


# --- folded away ----------------------------------------------------------------------------------


def _folded(evaluation: Evaluation, policy: HighlightedPolicy | None) -> Iterator[str]:
    chosen = [policy.gate.gate] if policy else []
    every = markup.render_wide_table(sheets.build_full_table(evaluation), sheets.COLUMN_DEFINITIONS, chosen)
    hint = f"{len(evaluation.gates)} rows, each gate at its own threshold"
    yield markup.render_folded_section(
        "gates", "All gates, all numbers", "Heads sort; 95 % intervals in brackets.", [every], hint
    )
    yield _ranking(evaluation, policy)
    if evaluation.trial.open_right is not None:
        yield _comparisons(evaluation)
        yield _slices(evaluation)
    yield _about(evaluation)
    yield _how()


def _ranking(evaluation: Evaluation, policy: HighlightedPolicy | None) -> str:
    intro = "How well need tells what the LLM does not know, whatever the threshold; and whether it is a probability."
    gates = _tellers(evaluation, policy)
    drawn = (
        [markup.render_figure(charts.draw_roc_chart(evaluation, gates[:MAX_ROC_CURVES]), "ROC curves, with AUROC")]
        if gates
        else []
    )
    for gate in gates[:MAX_CHARTED_GATES]:
        drawn.append(markup.render_figure(charts.draw_reliability_chart(evaluation, gate), f"Calibration: {gate.gate}"))
        drawn.append(markup.render_figure(charts.draw_need_histogram(evaluation, gate), f"Needs: {gate.gate}"))
    hint = f"{min(MAX_CHARTED_GATES, len(gates))} gates, the best by AUROC among them"
    return markup.render_folded_section("ranking", "Calibration and ROC", intro, [markup.render_pair(drawn)], hint)


def _tellers(evaluation: Evaluation, policy: HighlightedPolicy | None) -> list[GateResult]:
    """The gate that is looked at closely, then those that best tell what the LLM does not know."""
    first = [policy.gate] if policy else []
    ranked = sorted(rank_gates(evaluation), key=lambda gate: -(gate.measures["auroc"].value or 0.0))
    return first + [gate for gate in ranked if gate not in first]


def _comparisons(evaluation: Evaluation) -> str:
    intro = "Each gate against always retrieving, and the most accurate gate against the others, on the same questions."
    parts = [_table(sheets.build_comparison_table(evaluation)), _table(sheets.build_frontier_table(evaluation))]
    parts += [_table(build_second_look_table(evaluation.second))] if evaluation.second else []
    parts += [_table(build_action_table(evaluation.actions))] if evaluation.actions else []
    return markup.render_folded_section(
        "compared", "Tests and thresholds", intro, parts, "differences with p-values, rates, areas"
    )


def _slices(evaluation: Evaluation) -> str:
    parts = [_table(sheet) for sheet in sheets.build_gate_slice_tables(evaluation)]
    if not parts:
        return ""
    intro = "Accuracy @ retrieval rate, and in brackets the gain over matched random in points."
    return markup.render_folded_section("slices", "All gates by part", intro, parts)


def _about(evaluation: Evaluation) -> str:
    trial = evaluation.trial
    left = ", ".join(f"{count} {reason}" for reason, count in trial.left_out.items() if count) or "none"
    rows = (
        ("model", str(trial.settings["model"])),
        ("label runs", ", ".join(Path(run).name for run in trial.runs)),
        ("questions", str(len(trial.rows))),
        ("left out", left),
        ("nothing found, so answered closed-book either way", str(trial.n_without_passages)),
        ("graded by", str(trial.settings["grader"])),
        ("intervals", f"95 %, {evaluation.resamples} bootstrap resamples"),
    )
    intro = "Every gate decides on the same recorded questions; nothing was answered again for this page."
    return markup.render_folded_section(
        "about", "What was measured", intro, [markup.render_table(TextTable("Trial", ("", "value"), rows), kind="text")]
    )


def _table(sheet: TextTable) -> str:
    return markup.render_table(sheet, sheets.COLUMN_DEFINITIONS)


def _how() -> str:
    chosen = "".join(f"<li>{escape_html(step)}</li>" for step in RECOMMENDATION_STEPS)
    parts = [
        f'<h3 id="choosing">How a recommendation is chosen</h3><ol>{chosen}</ol>',
        markup.render_definitions("Definitions", sheets.COLUMN_DEFINITIONS),
    ]
    return markup.render_folded_section(
        "how", "How every number is computed", "What the heads of the tables mean.", parts
    )
