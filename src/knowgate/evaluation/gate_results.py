"""Measures of one gate on a label table: accuracy, cost, ranking and calibration, with bootstrap intervals.

Above `MAX_EXACT_QUESTIONS` questions, resamples are measured on cells instead of questions. A cell groups questions of
nearly equal need with the same two verdicts. Cells end at the gate's threshold and at the bins of the calibration
error, so decisions stay exact; only the order of neighboring needs is lost. The error this causes on the full sample
is known and subtracted. What remains changes no measure of a resample by more than 5e-5 (30,000 questions; tested).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import LabelTable
from knowgate.evaluation.cost import estimate_gated_cost
from knowgate.evaluation.replay import PolicyCost
from knowgate.gates.calibration.threshold_choice import GateOutcomes, choose_for_accuracy, evaluate_threshold
from knowgate.stats import metrics
from knowgate.stats.bootstrap import Bootstrap, Estimate, WeightedMetric, summarize_resamples

Values = Mapping[str, metrics.FloatArray]  # measure -> one value per sample
MAX_EXACT_QUESTIONS = 20_000
NEED_LEVELS = 1_024  # levels of need that cells are formed from, each with about as many questions
RETRIEVAL_RATES: tuple[float, ...] = (0.9, 0.75, 0.5, 0.25)  # rates whose accuracy the tables show
DECISION_MEASURES = ("accuracy", "rate", "random", "gain", "loss", "harm", "waste", "recovered")


@dataclass(frozen=True)
class TunedThreshold:
    """The most accurate threshold on the dev rows, measured on the others. Dev rows are for tuning.

    Attributes:
        threshold: The threshold.
        accuracy: Accuracy on the other rows.
        rate: Retrieval rate on the other rows.
        always: Accuracy of always retrieving on the other rows.
        n: Number of the other rows.
    """

    threshold: float
    accuracy: float
    rate: float
    always: float
    n: int


@dataclass(frozen=True)
class GateResult:
    """Everything measured about one gate.

    Attributes:
        scores: The needs for retrieval that the gate gives to the questions, its threshold, and what its decisions cost.
        measures: Estimates by name. Measures that need open-book answers are missing without them.
        cost: Mean cost per question.
        right: Whether the final answer to each question is correct.
        resampled: For each measure, its value on all questions, followed by its values on the bootstrap resamples.
        frontier: Accuracy at every retrieval rate; None without open-book answers.
        tuned: The most accurate threshold on some of the questions, measured on the others.
    """

    scores: TableScores
    measures: dict[str, Estimate]
    cost: PolicyCost
    right: metrics.BoolArray = field(repr=False)
    resampled: dict[str, metrics.FloatArray] = field(repr=False)
    frontier: metrics.Frontier | None = field(default=None, repr=False)
    tuned: TunedThreshold | None = None

    @property
    def gate(self) -> str:
        """Name of the gate in the tables."""
        return self.scores.gate

    @property
    def threshold(self) -> float:
        """The gate retrieves if the need of a question is above it."""
        return self.scores.threshold

    @property
    def needs(self) -> metrics.FloatArray:
        """Need for retrieval of each question (0 = the LLM knows, 1 = retrieve)."""
        return self.scores.needs

    @property
    def retrieve(self) -> metrics.BoolArray:
        """Whether the gate retrieves for each question."""
        return self.needs > self.threshold

    @property
    def can_rank(self) -> bool:
        """Whether the gate orders questions by need; the baselines do not."""
        return "auroc" in self.measures

    @property
    def at_rate(self) -> dict[float, float]:
        """Accuracy at each of `RETRIEVAL_RATES`; empty without open-book answers."""
        return {} if self.frontier is None else {rate: self.frontier.at(rate) for rate in RETRIEVAL_RATES}


def measure_gates(table: LabelTable, gates: Sequence[TableScores], bootstrap: Bootstrap) -> list[GateResult]:
    """Measure all gates, with intervals from the same bootstrap resamples. Many questions are grouped, to save time.

    Args:
        table: Labeled questions.
        gates: For each gate, the need for retrieval (0 to 1) that it gives to each question.
        bootstrap: The resamples.
    """
    grades = (table.closed_book_right, table.open_book_right)
    outcomes = [GradedNeeds(gate.needs, gate.threshold, *grades) for gate in gates]
    if bootstrap.n <= MAX_EXACT_QUESTIONS:
        resampled = bootstrap.apply([_build_gate_metric(outcome) for outcome in outcomes])
    else:
        resampled = _resample_cells(outcomes, bootstrap)
    return [_build_gate_result(table, gate, values) for gate, values in zip(gates, resampled, strict=True)]


def _build_gate_result(table: LabelTable, gate: TableScores, resampled: dict[str, metrics.FloatArray]) -> GateResult:
    """Collect everything measured about a gate.

    Args:
        table: The questions and their grades.
        gate: What the gate predicts for these questions.
        resampled: For each measure, its value on all questions, followed by its values on the bootstrap resamples.
    """
    retrieve = gate.needs > gate.threshold
    result = GateResult(
        gate,
        measures={name: summarize_resamples(values) for name, values in resampled.items()},
        cost=estimate_gated_cost(table, ~retrieve, gate),
        right=np.where(retrieve, table.retrieved_right, table.closed_book_right),
        resampled=resampled,
    )
    if table.open_book_right is None:
        return result
    frontier = metrics.compute_frontier(table.closed_book_right, table.open_book_right, gate.needs)
    return replace(result, frontier=frontier, tuned=tune_threshold(table, gate.needs))


def estimate_column_means(bootstrap: Bootstrap, columns: Mapping[str, NDArray[Any]]) -> dict[str, Estimate]:
    """Estimate the mean of each per-question column, all on the same resamples."""
    (resampled,) = bootstrap.apply([_build_mean_metric(columns)])
    return {name: summarize_resamples(means) for name, means in resampled.items()}


def _build_mean_metric(columns: Mapping[str, NDArray[Any]]) -> WeightedMetric:
    """Return a function that computes the mean of each column on bootstrap resamples.

    Its argument `weights` says how often each resample contains each question.
    """
    values = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)

    def compute_means(weights: metrics.WeightMatrix) -> dict[str, metrics.FloatArray]:
        means = metrics.weighted_mean(weights, values)  # resamples x columns
        return {name: means[:, number] for number, name in enumerate(columns)}

    return compute_means


def tune_threshold(table: LabelTable, needs: metrics.FloatArray) -> TunedThreshold | None:
    """Choose the most accurate threshold on the dev rows (marked for tuning), and measure it on the other rows.

    Args:
        table: Labeled questions with open-book answers.
        needs: Need for retrieval of each question, from 0 to 1.

    Returns:
        The threshold and its measures. None if there are no dev rows, or no other rows.
    """
    if not table.is_dev.any() or table.is_dev.all():
        return None
    outcomes = GateOutcomes(needs, table.closed_book_right, table.retrieved_right)
    threshold = choose_for_accuracy(outcomes.select(table.is_dev))
    test = evaluate_threshold(outcomes.select(~table.is_dev), threshold)
    return TunedThreshold(threshold, test.accuracy, test.rate, always=test.right_always / test.n, n=test.n)


# --- baselines ------------------------------------------------------------------------------------


def build_baselines(table: LabelTable) -> list[TableScores]:
    """Build the baselines `never`, `always` and `oracle`. The oracle retrieves just where passages help.

    Returns:
        The baselines as if they were gates. Empty if the questions have no answers with passages.
    """
    if table.open_book_right is None:
        return []
    n = len(table.rows)
    is_helped = (table.open_book_right & ~table.closed_book_right).astype(float)
    # Needs of 0 and 1 with a threshold of 0.5 stand for fixed decisions.
    return [
        TableScores("never", 0.5, np.zeros(n), drafts=False, about="answers closed-book"),
        TableScores("always", 0.5, np.ones(n), drafts=False, about="retrieves every time"),
        TableScores("oracle", 0.5, is_helped, drafts=False, about="knows both answers: the ceiling, not a gate"),
    ]


def make_baseline_result(table: LabelTable, result: GateResult) -> GateResult:
    """Return the result of a baseline without the measures of ranking and calibration.

    A baseline (`never`, `always` or `oracle`) only decides, so it has no scores to rank questions by. The oracle gets the
    best possible accuracy at every retrieval rate.
    """
    measures = {name: value for name, value in result.measures.items() if name in DECISION_MEASURES}
    result = replace(result, measures=measures, tuned=None)  # a baseline has no threshold to tune
    if result.gate != "oracle" or table.open_book_right is None:
        return result
    return replace(result, frontier=metrics.compute_oracle_frontier(table.closed_book_right, table.open_book_right))


def compute_majority_share(table: LabelTable) -> float:
    """Return the share of known or of unknown questions, whichever is larger."""
    known = float(table.closed_book_right.mean())
    return max(known, 1 - known)


# --- metrics of a resample ------------------------------------------------------------------------


@dataclass(frozen=True)
class GradedNeeds:
    """A gate's needs for retrieval, with the grades of both answers to each question.

    Attributes:
        needs: Need for retrieval of each question (0 = the LLM knows, 1 = retrieve).
        threshold: The gate retrieves if the need is above it.
        closed_book_right: Whether each closed-book answer is correct.
        open_book_right: Whether each answer with passages is correct; None if no question has one.
    """

    needs: metrics.FloatArray
    threshold: float
    closed_book_right: metrics.BoolArray
    open_book_right: metrics.BoolArray | None

    @property
    def retrieve(self) -> metrics.BoolArray:
        """Whether the gate retrieves for each question."""
        return self.needs > self.threshold


def _build_gate_metric(outcomes: GradedNeeds) -> WeightedMetric:
    """Return a function that computes all measures of a gate on bootstrap resamples.

    Its argument `weights` says how often each resample contains each question. Without answers with passages, only the
    ranking of the questions is measured.
    """
    measure_ranking = _build_ranking_metric(outcomes)
    if outcomes.open_book_right is None:
        return measure_ranking
    compute_means = _build_mean_metric(_list_decision_columns(outcomes, outcomes.open_book_right))
    return lambda weights: {**measure_ranking(weights), **_derive_measures(compute_means(weights))}


def _build_ranking_metric(outcomes: GradedNeeds) -> WeightedMetric:
    """Return a function that measures on bootstrap resamples how well a gate ranks questions.

    Questions that the LLM does not know should have higher needs than the others.
    """
    needs = outcomes.needs
    ranking = metrics.NeedRanking(needs)
    unknown = ~outcomes.closed_book_right  # wrong without passages
    open_book_right = outcomes.open_book_right
    helped = None if open_book_right is None else open_book_right & unknown  # right only with passages
    judged_correctly = outcomes.retrieve == unknown

    def measure(weights: metrics.WeightMatrix) -> dict[str, metrics.FloatArray]:
        """Compute all ranking measures, one value per resample; `weights` is (resamples x questions)."""
        by_need = ranking.sort(weights)
        values = ranking.areas(by_need, unknown)
        values["ece"] = metrics.weighted_ece(weights, unknown, needs)
        values["brier"] = metrics.weighted_brier(weights, unknown, needs)
        values["judged"] = metrics.weighted_mean(weights, judged_correctly)
        if helped is not None:
            values["auroc_benefit"] = ranking.auroc(by_need, helped)
        return values

    return measure


def _list_decision_columns(outcomes: GradedNeeds, open_book_right: metrics.BoolArray) -> dict[str, metrics.BoolArray]:
    """Return for each question what a gate's decision leads to. The measures are derived from the means."""
    closed_book_right, retrieve = outcomes.closed_book_right, outcomes.retrieve
    return {
        "accuracy": np.where(retrieve, open_book_right, closed_book_right),
        "rate": retrieve,
        "never": closed_book_right,
        "always": open_book_right,
        "oracle": closed_book_right | open_book_right,
        "harm": ~retrieve & open_book_right & ~closed_book_right,  # skipped, but only the open-book answer is right
        "waste": retrieve & closed_book_right,  # retrieved, although the closed-book answer is right
        "skipped_right": ~retrieve & closed_book_right,
    }


def _derive_measures(means: Values) -> dict[str, metrics.FloatArray]:
    """Derive a gate's measures from means over questions.

    `random` is the accuracy of retrieving as often, but at random. `recovered` is the share of the accuracy between
    never retrieving and the oracle. `closed_if_known` is the accuracy without passages on the questions that the gate
    skips, which it judges as known; `closed_if_unknown` is the same on the questions that it retrieves for.
    """
    random = means["rate"] * means["always"] + (1 - means["rate"]) * means["never"]
    return {
        **{name: means[name] for name in ("accuracy", "rate", "harm", "waste")},
        "random": random,
        "gain": means["accuracy"] - random,
        "loss": means["always"] - means["accuracy"],
        "recovered": metrics.safe_divide(means["accuracy"] - means["never"], means["oracle"] - means["never"]),
        "closed_if_known": metrics.safe_divide(means["skipped_right"], 1 - means["rate"]),
        "closed_if_unknown": metrics.safe_divide(means["waste"], means["rate"]),
    }


# --- cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuestionCells:
    """Questions grouped into cells, so that a bootstrap resample is measured in less time.

    The questions of a cell have similar needs and equal grades, so one question can stand for all of them.

    Attributes:
        cells: One stand-in question per cell.
        cell_of_question: Index of the cell that each question is in.
    """

    cells: GradedNeeds
    cell_of_question: NDArray[np.int32]

    def sum_weights(self, weights: metrics.WeightMatrix) -> metrics.WeightMatrix:
        """Sum the weights of the questions in each cell: (resamples x questions) becomes (resamples x cells)."""
        n_cells = len(self.cells.needs)
        return np.stack([np.bincount(self.cell_of_question, weights=row, minlength=n_cells) for row in weights])

    def build_metric(self) -> WeightedMetric:
        """Return a function that computes all measures of a gate on bootstrap resamples, but with less work.

        The function measures one stand-in question per cell (a group of questions of similar need and equal grades). Each
        gets the sum of the weights of the questions in its cell.
        """
        measure_cells = _build_gate_metric(self.cells)
        return lambda weights: measure_cells(self.sum_weights(weights))


def _resample_cells(gates: Sequence[GradedNeeds], bootstrap: Bootstrap) -> list[dict[str, metrics.FloatArray]]:
    """Measure gates on bootstrap resamples, fast, by grouping similar questions into cells.

    Returns:
        For each gate and measure, the value on all questions, followed by the values on the resamples.
    """
    full_sample = metrics.unit_weights(bootstrap.n)
    cell_metrics = [group_into_cells(gate).build_metric() for gate in gates]
    results = []
    all_resamples = bootstrap.apply(cell_metrics, with_original=False)
    for gate, cell_metric, resamples in zip(gates, cell_metrics, all_resamples, strict=True):
        exact, approximate = _build_gate_metric(gate)(full_sample), cell_metric(full_sample)
        measures = dict(exact)
        for name, values in resamples.items():  # empty if no resamples are asked for
            # Measures on cells are slightly wrong. The error is known for the full sample, and is subtracted.
            error = approximate[name] - exact[name]
            measures[name] = np.concatenate([exact[name], values - error])
        results.append(measures)
    return results


def group_into_cells(outcomes: GradedNeeds) -> QuestionCells:
    """Group questions into cells: all questions of a cell have the same level of need and the same grades."""
    level = _assign_need_levels(outcomes)
    open_book_right = False if outcomes.open_book_right is None else outcomes.open_book_right
    # The code of a cell is 4 times its level plus a number for the two grades: 2 if the closed-book answer is right, plus
    # 1 if the open-book answer is right.
    codes = 4 * level.astype(np.int64) + 2 * outcomes.closed_book_right + open_book_right
    cell_codes, cell_of_question = np.unique(codes, return_inverse=True)
    cell_level, cell_grades = np.divmod(cell_codes, 4)
    representatives = GradedNeeds(  # one stand-in question per cell
        needs=_compute_level_means(outcomes.needs, level)[cell_level],
        threshold=outcomes.threshold,
        closed_book_right=cell_grades >= 2,
        open_book_right=None if outcomes.open_book_right is None else cell_grades % 2 == 1,
    )
    return QuestionCells(representatives, cell_of_question.astype(np.int32))


def _assign_need_levels(outcomes: GradedNeeds) -> NDArray[np.int32]:
    """Return the level of need of each question, as a number that rises with the need.

    Levels are quantiles of the need. They are divided further, so that all questions of a level are in the same bin of
    the calibration error and on the same side of the threshold.
    """
    order = np.argsort(outcomes.needs, kind="stable")
    needs = outcomes.needs[order]
    first_rank = np.searchsorted(needs, needs, side="left")  # equal needs get the same rank, and so the same level
    quantile = first_rank * NEED_LEVELS // len(needs)
    # A new level starts wherever one of these values changes along the sorted needs.
    starts_level = np.zeros(len(needs), dtype=bool)
    for values in (quantile, metrics.assign_ece_bins(needs), needs > outcomes.threshold):
        starts_level[1:] |= values[1:] != values[:-1]
    level = np.empty(len(needs), dtype=np.int32)
    level[order] = np.cumsum(starts_level)
    return level


def _compute_level_means(needs: metrics.FloatArray, level: NDArray[np.int32]) -> metrics.FloatArray:
    """Return the mean need of each level, a group of similar needs.

    Rounding can move a mean outside the range of its group, and so across the threshold. It is clipped to that range.
    """
    means = np.bincount(level, weights=needs) / np.bincount(level)
    low, high = np.full(len(means), np.inf), np.full(len(means), -np.inf)
    np.minimum.at(low, level, needs)
    np.maximum.at(high, level, needs)
    return np.clip(means, low, high)
