"""Tables of an evaluation. The terminal, the page and table.md show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from knowgate.core.display import MISSING_VALUE, UNKNOWN_AMOUNT, TextTable, format_percent, format_points
from knowgate.evaluation.gate_comparison import Evaluation, SliceTable, build_answer_table, build_short_table
from knowgate.evaluation.gate_results import RETRIEVAL_RATES, GateResult, compute_majority_share
from knowgate.evaluation.post_retrieval import CASCADE_RATES, build_cascade_table, build_second_look_table
from knowgate.evaluation.retrieval_actions import build_action_table
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_p_value, format_percent_estimate, format_points_estimate
from knowgate.training.topics import build_topic_table

COLUMN_DEFINITIONS = {
    "threshold": "questions with more need are retrieved for; here each gate's own, not the recommended one",
    "accuracy": "share of questions whose final answer is graded right: closed-book where need is at most the "
    "threshold, open-book elsewhere",
    "retrieval": "share of questions with need above the threshold",
    "matched random": "accuracy of retrieving at random at the same rate: rate x always + (1 - rate) x never",
    "gain": "accuracy minus matched random, in points",
    "harm": "share of all questions skipped although open-book is right and closed-book wrong",
    "waste": "share of all questions retrieved for although closed-book is right",
    "headroom": "(accuracy - never) / (oracle - never)",
    "AUROC": "probability that a question answered wrong closed-book has more need than one answered right; ties half",
    "judged right": "share of questions rightly judged known (at or below the threshold) or unknown (above it)",
    "majority": "the same verdict for all questions, the commoner one: what 'judged right' must beat",
    "AUROC benefit": "the same for questions that retrieval turns right against all others",
    "AUPRC": "average precision of need for 'answered wrong closed-book'",
    "ECE": "expected calibration error of need as the probability of a wrong closed-book answer, 15 equal bins",
    "Brier": "mean squared difference of need and that outcome",
    "AURC": "area under the risk-coverage curve: mean share of wrong answers kept, least need first; lower is better",
    **{f"at {rate:.0%}": f"accuracy when {rate:.0%} of the questions, those of highest need, are retrieved for (exact "
       "top-k; equal needs share their mean)" for rate in RETRIEVAL_RATES},
    "area": "area under accuracy against retrieval rate (exact top-k curve)",
    "area of random": "area under the straight line from never to always",
    "tuned: accuracy": "accuracy on the other rows of the threshold with the best accuracy on a dev share of the rows",
    "at rate": "retrieval rate of that threshold on those rows",
    "n": "rows it was realised on",
    "closed-book accuracy, judged known": "closed-book accuracy among questions at or below the threshold",
    "judged unknown": "closed-book accuracy among questions above the threshold",
    "LLM calls": "calls of the LLM per question: the answer, the draft of a retrieved question, samples, extra passes; "
    "with an arbiter, both answers of every retrieved question",
    "deciding, ms": "milliseconds of deciding, per question; unknown where it was not timed",
    "retrievals": "searches per question",
    "generated tokens": "per question: the answer, the draft of a retrieved question, samples; prompts are not in it",
    "seconds": "of deciding, per question, where it was timed",
    "difference in points": "difference of accuracy with a 95 % paired bootstrap interval: the same resamples for all gates",
    "only it right": "questions only this gate's final answer has right",
    "only the other": "questions only the other's final answer has right",
    "p": "McNemar's exact test on those two counts",
    "p (Holm)": "the same, corrected for all comparisons of the table",
    "accuracy, no arbiter": "accuracy of the gate as it is: after retrieval the open-book answer is given",
    "accuracy, cascade": "the same where, after retrieval, the arbiter chooses between that answer and the one from "
    "memory; 'always' is the arbiter alone",
    "against always": "accuracy minus the accuracy of always retrieving, in points, with a 95 % bootstrap interval; "
    "below 0, right answers are lost; p: McNemar's exact test",
    "harmed": "share of questions always retrieving has right and the cascade wrong",
    "gained": "share of questions the cascade has right and always retrieving wrong",
    **{f"cascade at {rate:.0%}": f"accuracy of the cascade when {rate:.0%} of the questions, those of highest need, "
       "are retrieved for" for rate in CASCADE_RATES},
    "price of a search": "price of a search over price of a wrong answer",
    "skip": "share of questions answered from memory",
    "one retrieval": "share of questions answered with passages, or by the arbiter's choice where there is one",
    "several": "share of questions answered after several rounds of retrieval",
    "searches": "per question",
    "accuracy, three actions": "share of right answers where each question gets the action of highest expected gain: "
    "P(right), fitted to need on the dev rows, less the price of its searches; on the other rows",
    "against always once": "that minus the accuracy of one retrieval for every question, in points",
    "accuracy, one look": "accuracy of the gate as it is",
    "accuracy, two looks": "the same where passages that the judge finds useless are dropped and the answer is the "
    "closed-book one",
    "change": "difference of the two, in points, with a 95 % bootstrap interval",
    "against random drop": "accuracy with two looks minus that of dropping as many passages at random, in points",
    "passages shown": "share of questions whose LLM sees passages after the second look",
    "words of passages": "put into the prompt per question, with one look",
    "after two looks": "the same with two looks",
}  # fmt: skip


def build_evaluation_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build all tables of an evaluation."""
    if not evaluation.has_open_answers:
        yield build_ranking_table(evaluation)
        return
    yield build_answer_table(evaluation.gates)
    yield build_ranking_table(evaluation)
    yield build_frontier_table(evaluation)
    yield build_judgment_table(evaluation)
    yield build_cost_table(evaluation)
    yield build_comparison_table(evaluation)
    yield from _build_post_retrieval_tables(evaluation)
    yield from build_gate_slice_tables(evaluation)
    if evaluation.topics:
        yield build_topic_table(evaluation.topics)


def build_summary_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build the tables that the terminal shows by default: all gates, and what else was evaluated."""
    table = build_short_table(evaluation.gates)
    yield replace(table, title=f"{table.title}, without the arbiter") if evaluation.cascade else table
    yield from _build_post_retrieval_tables(evaluation)
    if evaluation.topics:
        yield build_topic_table(evaluation.topics)


def _build_post_retrieval_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build the tables of an arbiter, of several rounds of retrieval, and of a judge of passages, if evaluated."""
    if evaluation.cascade:
        yield build_cascade_table(evaluation.cascade)
    if evaluation.actions:
        yield build_action_table(evaluation.actions)
    if evaluation.second_looks:
        yield build_second_look_table(evaluation.second_looks)


def build_full_table(evaluation: Evaluation) -> TextTable:
    """Join the tables of measures into one, with a row for each gate."""
    tables = [build_ranking_table(evaluation), build_cost_table(evaluation)]
    if evaluation.has_open_answers:
        tables.insert(0, build_answer_table(evaluation.gates))
        tables += [build_frontier_table(evaluation), build_judgment_table(evaluation)]
    # The first table already has the column of LLM calls.
    tables = [tables[0], *(_drop_columns(table, ("LLM calls",)) for table in tables[1:])]
    columns = [column for table in tables for column in table.columns[1:]]
    cells_by_gate = [{row[0]: row[1:] for row in table.rows} for table in tables]
    rows = []
    for gate in evaluation.gates:
        cells: list[str] = []
        for table, by_gate in zip(tables, cells_by_gate, strict=True):
            no_values = (MISSING_VALUE,) * (len(table.columns) - 1)
            cells += by_gate.get(gate.gate, no_values)
        threshold = f"{gate.threshold:.3g}" if gate.can_rank else MISSING_VALUE
        rows.append((gate.gate, threshold, *cells, gate.note or MISSING_VALUE))
    return TextTable("All gates, all numbers", ("gate", "threshold", *columns, "about the gate"), tuple(rows))


def _drop_columns(table: TextTable, names: Sequence[str]) -> TextTable:
    """Return a table without some of its columns."""
    kept = [number for number, column in enumerate(table.columns) if column not in names]
    rows = tuple(tuple(row[number] for number in kept) for row in table.rows)
    return TextTable(table.title, tuple(table.columns[number] for number in kept), rows)


def build_ranking_table(evaluation: Evaluation) -> TextTable:
    """Build the table of how well need predicts what the LLM does not know."""
    columns = ("gate", "AUROC", "judged right", "AUPRC", "ECE", "Brier", "AURC", "AUROC benefit")
    measures = ("auroc", "judged", "auprc", "ece", "brier", "aurc", "auroc_benefit")
    rows = [
        (gate.gate, *(format_estimate(gate.measures.get(name)) for name in measures))
        for gate in evaluation.ranking_gates
    ]
    majority = f"{compute_majority_share(evaluation.table):.3f}"
    rows.append(("majority", MISSING_VALUE, majority, *[MISSING_VALUE] * 5))
    return TextTable("Does the need score predict what the LLM does not know?", columns, tuple(rows))


def build_frontier_table(evaluation: Evaluation) -> TextTable:
    """Build the table of accuracies at given retrieval rates and of tuned thresholds."""
    rates = [f"at {rate:.0%}" for rate in RETRIEVAL_RATES]
    columns = ("gate", *rates, "area", "area of random", "tuned: accuracy", "at rate", "n")
    rows = tuple(_make_frontier_row(gate) for gate in evaluation.gates)
    return TextTable("Accuracy at a given retrieval rate", columns, rows)


def _make_frontier_row(gate: GateResult) -> tuple[str, ...]:
    """Make the row of a gate: accuracy at each rate, areas, and the tuned threshold."""
    accuracies = [format_percent(gate.at_rate.get(rate)) for rate in RETRIEVAL_RATES]
    frontier, tuned = gate.frontier, gate.tuned
    areas = [f"{frontier.area:.3f}", f"{frontier.random_area:.3f}"] if frontier else [MISSING_VALUE] * 2
    tuning = [MISSING_VALUE] * 3
    if tuned:
        tuning = [format_percent(tuned.accuracy), format_percent(tuned.rate), str(tuned.n)]
    return (gate.gate, *accuracies, *areas, *tuning)


def build_judgment_table(evaluation: Evaluation) -> TextTable:
    """Build the table of closed-book accuracy among questions judged known and unknown."""
    measures = ("closed_if_known", "closed_if_unknown")
    rows = [
        (gate.gate, *(format_percent_estimate(gate.measures[name]) for name in measures))
        for gate in evaluation.gates
        if "closed_if_known" in gate.measures
    ]
    columns = ("gate", "closed-book accuracy, judged known", "judged unknown")
    return TextTable("Does the LLM know the questions that are judged as known?", columns, tuple(rows))


def build_cost_table(evaluation: Evaluation) -> TextTable:
    """Build the table of mean costs per question."""
    rows = [
        (
            gate.gate,
            f"{gate.cost.calls:.2f}",
            f"{gate.cost.retrievals:.2f}",
            UNKNOWN_AMOUNT if gate.cost.tokens is None else f"{gate.cost.tokens:.1f}",
            _format_seconds(gate),
        )
        for gate in evaluation.gates
    ]
    columns = ("gate", "LLM calls", "retrievals", "generated tokens", "seconds")
    return TextTable("Cost per question", columns, tuple(rows))


def _format_seconds(gate: GateResult) -> str:
    """Format the seconds of deciding; baselines decide nothing."""
    if gate.cost.seconds is None:
        return UNKNOWN_AMOUNT if gate.can_rank else MISSING_VALUE
    return f"{gate.cost.seconds:.4f}"


def build_comparison_table(evaluation: Evaluation) -> TextTable:
    """Build the table of paired tests between gates."""
    columns = ("gate", "against", "difference in points", "only it right", "only the other", "p", "p (Holm)")
    rows = [
        (
            pair.gate,
            pair.against,
            format_points_estimate(Estimate(pair.difference, pair.low, pair.high)),
            str(pair.only_gate),
            str(pair.only_against),
            format_p_value(pair.p_mcnemar),
            format_p_value(pair.p_holm),
        )
        for pair in evaluation.comparisons
    ]
    return TextTable("Gates compared on the same questions", columns, tuple(rows))


def build_gate_slice_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build a table for each dimension: accuracy @ retrieval rate, and the gain over random retrieval."""
    for dimension in dict.fromkeys(part.dimension for part in evaluation.slices):
        slices = [part for part in evaluation.slices if part.dimension == dimension]
        columns = ("gate", *(f"{part.value} (n = {part.n})" for part in slices))
        rows = [(gate.gate, *(_make_slice_cell(part, gate.gate) for part in slices)) for gate in evaluation.gates]
        yield TextTable(f"By {dimension}", columns, tuple(rows))


def _make_slice_cell(part: SliceTable, gate: str) -> str:
    """Format a gate's accuracy, retrieval rate and gain over random retrieval on a group of questions."""
    for name, accuracy, rate, random in part.rows:
        if name == gate:
            return f"{format_percent(accuracy)} @ {format_percent(rate)} ({format_points(accuracy - random)})"
    return "empty"


def format_estimate(estimate: Estimate | None) -> str:
    """Format an estimate with its interval, or as a missing value."""
    return MISSING_VALUE if estimate is None or estimate.value is None else estimate.format()
