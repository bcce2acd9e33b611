"""Tables of an evaluation. The terminal, the page and table.md show the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.evaluation.gate_comparison import (
    Evaluation,
    SliceTable,
    build_answer_table,
    build_short_table,
    format_estimate,
    format_threshold,
)
from knowgate.evaluation.gate_results import RETRIEVAL_RATES, GateResult, compute_majority_share
from knowgate.evaluation.post_retrieval import build_cascade_table, build_second_look_table
from knowgate.evaluation.report import html
from knowgate.evaluation.retrieval_actions import build_action_table
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import PairedComparison, format_p_value, format_percent_estimate, format_points_estimate
from knowgate.training.topics import build_topic_table

COLUMN_DEFINITIONS = html.load_texts("evaluation")


def build_evaluation_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build all tables of an evaluation."""
    if not evaluation.has_open_answers:
        yield build_ranking_table(evaluation)
        return
    yield build_answer_table(evaluation.gates)
    yield build_ranking_table(evaluation)
    yield build_frontier_table(evaluation)
    yield build_judgment_table(evaluation)
    yield from build_detail_tables(evaluation)


def build_detail_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build the tables of details, such as pairs of gates and topics."""
    yield build_comparison_table(evaluation)
    yield from _build_post_retrieval_tables(evaluation)
    yield from build_gate_slice_tables(evaluation)
    if evaluation.topics:
        yield build_topic_table(evaluation.topics)


def build_summary_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build the tables for the terminal: gates first, then optional results."""
    gates_table = build_short_table(evaluation.gates)
    if evaluation.cascade:  # the results with the arbiter are in a table of their own, below
        gates_table = replace(gates_table, title=f"{gates_table.title}, without the arbiter")
    yield gates_table
    yield from _build_post_retrieval_tables(evaluation)
    if evaluation.topics:
        yield build_topic_table(evaluation.topics)


def _build_post_retrieval_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build the tables on steps after the gate. Examples: an arbiter (it picks the answer), a judge of passages."""
    if evaluation.cascade:
        yield build_cascade_table(evaluation.cascade)
    if evaluation.actions:
        yield build_action_table(evaluation.actions)
    if evaluation.second_looks:
        yield build_second_look_table(evaluation.second_looks)


def build_full_table(evaluation: Evaluation) -> TextTable:
    """Join the tables of measures into one, with a row per gate. Missing values are dashes."""
    tables = [build_ranking_table(evaluation)]
    if evaluation.has_open_answers:
        tables.insert(0, build_answer_table(evaluation.gates))
        tables += [build_frontier_table(evaluation), build_judgment_table(evaluation)]
    columns = ["gate", "threshold"]
    for table in tables:
        columns += table.columns[1:]  # without the names of the gates
    rows = []
    for gate in evaluation.gates:
        measures = [cell for table in tables for cell in _get_gate_cells(table, gate.gate)]
        rows.append((gate.gate, format_threshold(gate), *measures, gate.scores.about or MISSING_VALUE))
    return TextTable("All gates, all numbers", (*columns, "about the gate"), tuple(rows))


def _get_gate_cells(table: TextTable, gate: str) -> Sequence[str]:
    """Return the cells of a gate's row without its name; dashes if it has no row."""
    no_values = (MISSING_VALUE,) * len(table.columns)
    row = next((row for row in table.rows if row[0] == gate), no_values)
    return row[1:]


def build_ranking_table(evaluation: Evaluation) -> TextTable:
    """Build the table of how well each gate's need predicts unknown questions."""
    columns = ("gate", "AUROC", "judged right", "AUPRC", "ECE", "Brier", "AURC", "AUROC benefit")
    measures = ("auroc", "judged", "auprc", "ece", "brier", "aurc", "auroc_benefit")
    gates = evaluation.ranking_gates
    rows = [(gate.gate, *(format_estimate(gate.measures.get(name)) for name in measures)) for gate in gates]
    # This baseline judges all questions alike: as known, or as unknown. It has no other measure.
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
    """Make the row of a gate.

    The cells are: accuracy at some retrieval rates; mean accuracy over all rates, of the gate and of chance; accuracy,
    retrieval rate and number of questions with a tuned threshold.
    """
    accuracies = [format_percent(gate.at_rate.get(rate)) for rate in RETRIEVAL_RATES]
    areas, tuning = [MISSING_VALUE] * 2, [MISSING_VALUE] * 3
    if gate.frontier:
        areas = [f"{gate.frontier.area:.3f}", f"{gate.frontier.random_area:.3f}"]
    if gate.tuned:
        tuning = [format_percent(gate.tuned.accuracy), format_percent(gate.tuned.rate), str(gate.tuned.n)]
    return (gate.gate, *accuracies, *areas, *tuning)


def build_judgment_table(evaluation: Evaluation) -> TextTable:
    """Build the table that checks what each gate judges as known or unknown to the LLM.

    Both groups of questions are answered without passages (closed-book). The LLM should be right more often on those
    judged as known.
    """
    measures = ("closed_if_known", "closed_if_unknown")
    gates = [gate for gate in evaluation.gates if "closed_if_known" in gate.measures]
    rows = [(gate.gate, *(format_percent_estimate(gate.measures[name]) for name in measures)) for gate in gates]
    columns = ("gate", "closed-book accuracy, judged known", "judged unknown")
    return TextTable("Does the LLM know the questions that are judged as known?", columns, tuple(rows))


def build_comparison_table(evaluation: Evaluation) -> TextTable:
    """Build the table of paired tests between gates."""
    columns: dict[str, Callable[[PairedComparison], str]] = {
        "gate": lambda pair: pair.gate,
        "against": lambda pair: pair.against,
        "difference in points": lambda pair: format_points_estimate(Estimate(pair.difference, pair.low, pair.high)),
        "only it right": lambda pair: str(pair.only_gate),
        "only the other": lambda pair: str(pair.only_against),
        "p": lambda pair: format_p_value(pair.p_mcnemar),
        "p (Holm)": lambda pair: format_p_value(pair.p_holm),
    }
    return TextTable.build("Gates compared on the same questions", evaluation.comparisons, columns)


def build_gate_slice_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """Build a table per dimension, such as the language, with a row per gate."""
    for dimension in dict.fromkeys(part.dimension for part in evaluation.slices):
        slices = [part for part in evaluation.slices if part.dimension == dimension]
        columns = ("gate", *(f"{part.value} (n = {part.n})" for part in slices))
        rows = [(gate.gate, *(_make_slice_cell(part, gate.gate) for part in slices)) for gate in evaluation.gates]
        yield TextTable(f"By {dimension}", columns, tuple(rows))


def _make_slice_cell(part: SliceTable, gate: str) -> str:
    """Format accuracy, retrieval rate and gain over random. Example: '52.0 % @ 40.0 % (+1.2)'."""
    for result in part.rows:
        if result.gate == gate:
            gain = format_points(result.accuracy - result.random)
            return f"{format_percent(result.accuracy)} @ {format_percent(result.rate)} ({gain})"
    return "empty"
