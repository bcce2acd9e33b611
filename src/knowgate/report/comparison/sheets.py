"""The tables of an evaluation as plain cells: the terminal, the page and the Markdown file show the same ones."""

from __future__ import annotations

from collections.abc import Iterator

from knowgate.display import NOTHING, Sheet, percent, points, points_with_interval, share_with_interval
from knowgate.evaluation import (
    CASCADE_RATES,
    RATES,
    Evaluation,
    GateResult,
    SliceTable,
    action_sheet,
    cascade_sheet,
    main_sheet,
    majority_share,
    second_sheet,
)
from knowgate.statistics import Estimate

HOW = {
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
       "top-k; equal needs share their mean)" for rate in RATES},
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


def all_sheets(evaluation: Evaluation) -> Iterator[Sheet]:
    has_open = evaluation.trial.open_right is not None
    if has_open:
        yield main(evaluation)
    yield ranking(evaluation)
    if has_open:
        yield frontier(evaluation)
        yield judged(evaluation)
        yield costs(evaluation)
        yield comparisons(evaluation)
        if evaluation.cascade:
            yield cascade_sheet(evaluation.cascade)
        if evaluation.actions:
            yield action_sheet(evaluation.actions)
        if evaluation.second:
            yield second_sheet(evaluation.second)
        yield from slices(evaluation)


def every(evaluation: Evaluation) -> Sheet:
    """All numbers of all gates in one table."""
    parts = [ranking(evaluation), costs(evaluation)]
    if evaluation.trial.open_right is not None:
        parts = [main(evaluation), *parts, frontier(evaluation), judged(evaluation)]
    columns = [column for part in parts for column in part.columns[1:]]
    cells = [{row[0]: row[1:] for row in part.rows} for part in parts]
    rows = []
    for gate in evaluation.gates:
        found = [
            cell.get(gate.gate, (NOTHING,) * (len(part.columns) - 1)) for cell, part in zip(cells, parts, strict=True)
        ]
        cells_of_gate = [value for part in found for value in part]
        rows.append((gate.gate, f"{gate.threshold:.3g}", *cells_of_gate, gate.note or NOTHING))
    return Sheet("All gates, all numbers", ("gate", "threshold", *columns, "about the gate"), tuple(rows))


def main(evaluation: Evaluation) -> Sheet:
    return main_sheet(evaluation.gates)


def ranking(evaluation: Evaluation) -> Sheet:
    columns = ("gate", "AUROC", "judged right", "AUPRC", "ECE", "Brier", "AURC", "AUROC benefit")
    rows = [
        (gate.gate, *(plain(gate.measures.get(name)) for name in ("auroc", "judged", "auprc", "ece", "brier", "aurc")),
         plain(gate.measures.get("auroc_benefit")))
        for gate in evaluation.gates
        if "auroc" in gate.measures
    ]  # fmt: skip
    rows.append(("majority", NOTHING, f"{majority_share(evaluation.trial):.3f}", *[NOTHING] * 5))
    return Sheet("Does need tell what the LLM does not know?", columns, tuple(rows))


def frontier(evaluation: Evaluation) -> Sheet:
    columns = (
        "gate",
        *(f"at {rate:.0%}" for rate in RATES),
        "area",
        "area of random",
        "tuned: accuracy",
        "at rate",
        "n",
    )
    return Sheet("Accuracy at a given retrieval rate", columns, tuple(_frontier_row(gate) for gate in evaluation.gates))


def _frontier_row(gate: GateResult) -> tuple[str, ...]:
    rates = [percent(gate.at_rate.get(rate)) for rate in RATES]
    curve, tuned = gate.frontier, gate.tuned
    areas = (f"{curve.area:.3f}", f"{curve.random_area:.3f}") if curve else (NOTHING, NOTHING)
    told = (percent(tuned.accuracy), percent(tuned.rate), str(tuned.n)) if tuned else (NOTHING,) * 3
    return (gate.gate, *rates, *areas, *told)


def judged(evaluation: Evaluation) -> Sheet:
    rows = [
        (gate.gate, *(share_with_interval(gate.measures[name]) for name in ("closed_if_known", "closed_if_unknown")))
        for gate in evaluation.gates
        if "closed_if_known" in gate.measures
    ]
    columns = ("gate", "closed-book accuracy, judged known", "judged unknown")
    return Sheet("Are the questions judged known known?", columns, tuple(rows))


def costs(evaluation: Evaluation) -> Sheet:
    rows = [
        (
            gate.gate,
            f"{gate.cost.calls:.2f}",
            f"{gate.cost.retrievals:.2f}",
            NOTHING if gate.cost.tokens is None else f"{gate.cost.tokens:.1f}",
            NOTHING if gate.cost.seconds is None else f"{gate.cost.seconds:.4f}",
        )
        for gate in evaluation.gates
    ]
    return Sheet("Cost per question", ("gate", "LM calls", "retrievals", "generated tokens", "seconds"), tuple(rows))


def comparisons(evaluation: Evaluation) -> Sheet:
    columns = ("gate", "against", "difference in points", "only it right", "only the other", "p", "p (Holm)")
    rows = [
        (
            one.gate,
            one.against,
            points_with_interval(Estimate(one.difference, one.low, one.high)),
            str(one.only_gate),
            str(one.only_against),
            _p(one.p_mcnemar),
            _p(one.p_holm),
        )
        for one in evaluation.comparisons
    ]
    return Sheet("Gates compared on the same questions", columns, tuple(rows))


def slices(evaluation: Evaluation) -> Iterator[Sheet]:
    """One table per dimension: accuracy @ retrieval rate, and the gain over matched random."""
    for dimension in dict.fromkeys(one.dimension for one in evaluation.slices):
        parts = [one for one in evaluation.slices if one.dimension == dimension]
        columns = ("gate", *(f"{one.value} (n = {one.n})" for one in parts))
        names = [gate.gate for gate in evaluation.gates]
        yield Sheet(
            f"By {dimension}", columns, tuple((name, *(_slice_cell(part, name) for part in parts)) for name in names)
        )


def _slice_cell(part: SliceTable, name: str) -> str:
    for gate, accuracy, rate, random in part.rows:
        if gate == name:
            return f"{percent(accuracy)} @ {percent(rate)} ({points(accuracy - random)})"
    return "empty"


def plain(value: Estimate | None) -> str:
    return NOTHING if value is None or value.value is None else value.shown()


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
