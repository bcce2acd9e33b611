"""The tables of an evaluation as plain cells: the terminal, the page and the Markdown file show the same ones."""

from __future__ import annotations

from collections.abc import Iterator

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.evaluation.gate_comparison import Evaluation, SliceTable, build_answer_table
from knowgate.evaluation.gate_results import RETRIEVAL_RATES, GateResult, compute_majority_share
from knowgate.evaluation.post_retrieval import CASCADE_RATES, build_cascade_table, build_second_look_table
from knowgate.evaluation.retrieval_actions import build_action_table
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.formats import format_percent_estimate, format_points_estimate

COLUMN_DEFINITIONS = {
    "threshold": "questions with more need are retrieved for; here each gate's own, not the recommended one",
    "accuracy": "share of questions whose final answer is graded right: closed-book where need is at most the "
    "threshold, open-book elsewhere",
    "retrieval": "share of questions with need above the threshold",
    "matched random": "accuracy of retrieving at random at the same rate: rate x always + (1 - rate) x never",
    "gain": "accuracy minus matched random, in points",
    "loss": "accuracy of always retrieving minus accuracy, in points",
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
    "LM calls": "runs of the LLM per question: the answer, the draft of a retrieved question, samples, extra passes",
    "retrievals": "searches per question",
    "generated tokens": "per question: the answer, the draft of a retrieved question, samples; prompts are not in it",
    "seconds": "of deciding, per question, where it was timed",
    "difference in points": "difference of accuracy with a 95 % paired bootstrap interval: the same resamples for all "
    "gates",
    "only it right": "questions only this gate's final answer has right",
    "only the other": "questions only the other's final answer has right",
    "p": "McNemar's exact test on those two counts",
    "p (Holm)": "the same, corrected for all comparisons of the table",
    "accuracy, no arbiter": "accuracy of the gate as it is: after retrieval the open-book answer is given",
    "accuracy, cascade": "the same where, after retrieval, the arbiter chooses between that answer and the one from "
    "memory; 'always' is the arbiter alone",
    "against always": "accuracy of the cascade minus that of always giving the open-book answer, in points, with a "
    "95 % bootstrap interval; p: McNemar's exact test",
    "harmed": "share of questions always retrieving has right and the cascade wrong",
    "gained": "share of questions the cascade has right and always retrieving wrong",
    **{f"cascade at {rate:.0%}": f"accuracy of the cascade when {rate:.0%} of the questions, those of highest need, "
       "are retrieved for" for rate in CASCADE_RATES},
    "price of a search": "in right answers: --price-retrieval over --price-wrong",
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
    has_open = evaluation.trial.open_right is not None
    if has_open:
        yield build_main_table(evaluation)
    yield build_ranking_table(evaluation)
    if has_open:
        yield build_frontier_table(evaluation)
        yield build_judgment_table(evaluation)
        yield build_cost_table(evaluation)
        yield build_comparison_table(evaluation)
        if evaluation.cascade:
            yield build_cascade_table(evaluation.cascade)
        if evaluation.actions:
            yield build_action_table(evaluation.actions)
        if evaluation.second:
            yield build_second_look_table(evaluation.second)
        yield from build_gate_slice_tables(evaluation)


def build_full_table(evaluation: Evaluation) -> TextTable:
    """All numbers of all gates in one table."""
    parts = [build_ranking_table(evaluation), build_cost_table(evaluation)]
    if evaluation.trial.open_right is not None:
        parts = [
            build_main_table(evaluation),
            *parts,
            build_frontier_table(evaluation),
            build_judgment_table(evaluation),
        ]
    columns = [column for part in parts for column in part.columns[1:]]
    cells = [{row[0]: row[1:] for row in part.rows} for part in parts]
    rows = []
    for gate in evaluation.gates:
        found = [
            cell.get(gate.gate, (MISSING_VALUE,) * (len(part.columns) - 1))
            for cell, part in zip(cells, parts, strict=True)
        ]
        cells_of_gate = [value for part in found for value in part]
        rows.append((gate.gate, f"{gate.threshold:.3g}", *cells_of_gate, gate.note or MISSING_VALUE))
    return TextTable("All gates, all numbers", ("gate", "threshold", *columns, "about the gate"), tuple(rows))


def build_main_table(evaluation: Evaluation) -> TextTable:
    return build_answer_table(evaluation.gates)


def build_ranking_table(evaluation: Evaluation) -> TextTable:
    columns = ("gate", "AUROC", "judged right", "AUPRC", "ECE", "Brier", "AURC", "AUROC benefit")
    rows = [
        (gate.gate, *(format_estimate(gate.measures.get(name)) for name in ("auroc", "judged", "auprc", "ece", "brier", "aurc")),
         format_estimate(gate.measures.get("auroc_benefit")))
        for gate in evaluation.gates
        if "auroc" in gate.measures
    ]  # fmt: skip
    rows.append(("majority", MISSING_VALUE, f"{compute_majority_share(evaluation.trial):.3f}", *[MISSING_VALUE] * 5))
    return TextTable("Does need tell what the LLM does not know?", columns, tuple(rows))


def build_frontier_table(evaluation: Evaluation) -> TextTable:
    columns = (
        "gate",
        *(f"at {rate:.0%}" for rate in RETRIEVAL_RATES),
        "area",
        "area of random",
        "tuned: accuracy",
        "at rate",
        "n",
    )
    return TextTable(
        "Accuracy at a given retrieval rate", columns, tuple(_frontier_row(gate) for gate in evaluation.gates)
    )


def _frontier_row(gate: GateResult) -> tuple[str, ...]:
    rates = [format_percent(gate.at_rate.get(rate)) for rate in RETRIEVAL_RATES]
    curve, tuned = gate.frontier, gate.tuned
    areas = (f"{curve.area:.3f}", f"{curve.random_area:.3f}") if curve else (MISSING_VALUE, MISSING_VALUE)
    told = (format_percent(tuned.accuracy), format_percent(tuned.rate), str(tuned.n)) if tuned else (MISSING_VALUE,) * 3
    return (gate.gate, *rates, *areas, *told)


def build_judgment_table(evaluation: Evaluation) -> TextTable:
    rows = [
        (
            gate.gate,
            *(format_percent_estimate(gate.measures[name]) for name in ("closed_if_known", "closed_if_unknown")),
        )
        for gate in evaluation.gates
        if "closed_if_known" in gate.measures
    ]
    columns = ("gate", "closed-book accuracy, judged known", "judged unknown")
    return TextTable("Are the questions judged known known?", columns, tuple(rows))


def build_cost_table(evaluation: Evaluation) -> TextTable:
    rows = [
        (
            gate.gate,
            f"{gate.cost.calls:.2f}",
            f"{gate.cost.retrievals:.2f}",
            MISSING_VALUE if gate.cost.tokens is None else f"{gate.cost.tokens:.1f}",
            MISSING_VALUE if gate.cost.seconds is None else f"{gate.cost.seconds:.4f}",
        )
        for gate in evaluation.gates
    ]
    return TextTable(
        "Cost per question", ("gate", "LM calls", "retrievals", "generated tokens", "seconds"), tuple(rows)
    )


def build_comparison_table(evaluation: Evaluation) -> TextTable:
    columns = ("gate", "against", "difference in points", "only it right", "only the other", "p", "p (Holm)")
    rows = [
        (
            one.gate,
            one.against,
            format_points_estimate(Estimate(one.difference, one.low, one.high)),
            str(one.only_gate),
            str(one.only_against),
            _p(one.p_mcnemar),
            _p(one.p_holm),
        )
        for one in evaluation.comparisons
    ]
    return TextTable("Gates compared on the same questions", columns, tuple(rows))


def build_gate_slice_tables(evaluation: Evaluation) -> Iterator[TextTable]:
    """One table per dimension: accuracy @ retrieval rate, and the gain over matched random."""
    for dimension in dict.fromkeys(one.dimension for one in evaluation.slices):
        parts = [one for one in evaluation.slices if one.dimension == dimension]
        columns = ("gate", *(f"{one.value} (n = {one.n})" for one in parts))
        names = [gate.gate for gate in evaluation.gates]
        yield TextTable(
            f"By {dimension}", columns, tuple((name, *(_slice_cell(part, name) for part in parts)) for name in names)
        )


def _slice_cell(part: SliceTable, name: str) -> str:
    for gate, accuracy, rate, random in part.rows:
        if gate == name:
            return f"{format_percent(accuracy)} @ {format_percent(rate)} ({format_points(accuracy - random)})"
    return "empty"


def format_estimate(value: Estimate | None) -> str:
    return MISSING_VALUE if value is None or value.value is None else value.shown()


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
