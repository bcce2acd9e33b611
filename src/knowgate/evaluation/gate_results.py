"""What a gate's decisions come to: accuracy, cost, ranking and calibration, each with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from knowgate.data.runs.table import LabelTable
from knowgate.evaluation.frontier import Frontier, compute_frontier, compute_oracle_frontier
from knowgate.gates.calibration.threshold_choice import GateOutcomes, choose_for_accuracy, evaluate_threshold
from knowgate.gates.offline_scoring import TableScores
from knowgate.stats.bootstrap import Bootstrap, Estimate, WeightedMetric, summarize_resamples
from knowgate.stats.metrics import (
    BoolArray,
    FloatArray,
    NeedRanking,
    WeightMatrix,
    assign_ece_bins,
    safe_divide,
    unit_weights,
    weighted_brier,
    weighted_ece,
    weighted_mean,
)

NEED_LEVELS = 1_024  # of need, of equal numbers of questions


@dataclass(frozen=True)
class GradedNeeds:
    """Questions with a gate's needs and their verdicts; opened: None without open-book answers."""

    needs: FloatArray
    threshold: float
    closed: BoolArray
    opened: BoolArray | None

    @property
    def retrieve(self) -> BoolArray:
        return self.needs > self.threshold


@dataclass(frozen=True)
class QuestionCells:
    """Cells as if each were a question, and the number of the cell that every question is in."""

    judged: GradedNeeds
    code: NDArray[np.int32]

    def count(self, weights: WeightMatrix) -> WeightMatrix:
        """How often each cell is drawn, of how often each question is."""
        size = len(self.judged.needs)
        return np.stack([np.bincount(self.code, weights=row, minlength=size) for row in weights])

    def measure(self, inner: WeightedMetric) -> WeightedMetric:
        """A measure of cells, for weights of questions."""
        return lambda weights: inner(self.count(weights))


def group_into_cells(judged: GradedNeeds) -> QuestionCells:
    level = _levels(judged)
    opened = judged.closed if judged.opened is None else judged.opened
    number = level.astype(np.int64) * 4 + 2 * judged.closed + opened
    kinds, code = np.unique(number, return_inverse=True)
    means = _means(judged.needs, level)[kinds // 4]
    verdicts = (kinds % 4) // 2 == 1, kinds % 2 == 1
    one = GradedNeeds(means, judged.threshold, verdicts[0], None if judged.opened is None else verdicts[1])
    return QuestionCells(one, code.astype(np.int32))


def _levels(judged: GradedNeeds) -> NDArray[np.int32]:
    """Rising with need: equal needs are in one level, and a level does not reach over a threshold or a bin's end."""
    order = np.argsort(judged.needs, kind="stable")
    needs = judged.needs[order]
    first = np.searchsorted(needs, needs, side="left")  # where each run of equal needs begins
    sides = (first * NEED_LEVELS // len(needs), assign_ece_bins(needs), needs > judged.threshold)
    begins = np.zeros(len(needs), dtype=bool)
    for side in sides:
        begins[1:] |= side[1:] != side[:-1]
    level = np.empty(len(needs), dtype=np.int32)
    level[order] = np.cumsum(begins)
    return level


def _means(needs: FloatArray, level: NDArray[np.int32]) -> FloatArray:
    """The mean need of each level; where all are equal, that need to the last bit."""
    means = np.bincount(level, weights=needs) / np.bincount(level)
    low, high = np.full(len(means), np.inf), np.full(len(means), -np.inf)
    np.minimum.at(low, level, needs)
    np.maximum.at(high, level, needs)
    return np.clip(means, low, high)


MAX_EXACT_QUESTIONS = 20_000  # questions; of more, resamples are measured in cells
RETRIEVAL_RATES: tuple[float, ...] = (0.9, 0.75, 0.5, 0.25)  # retrieval rates whose accuracy the tables show
DECISION_MEASURES = ("accuracy", "rate", "random", "gain", "loss", "harm", "waste", "recovered")


@dataclass(frozen=True)
class TunedThreshold:
    """A threshold chosen for accuracy on the dev rows, and what it came to on the others."""

    threshold: float
    dev_accuracy: float
    accuracy: float
    rate: float
    random: float
    always: float
    n: int


@dataclass(frozen=True)
class GateCost:
    """Per question. tokens: generated, None if the rows do not tell. seconds: of the decision, None if not timed."""

    calls: float
    retrievals: float
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True)
class GateResult:
    """Everything about one gate on one trial. Measures that need open-book answers are absent without them."""

    gate: str
    threshold: float
    measures: dict[str, Estimate]
    cost: GateCost
    at_rate: dict[float, float] = field(default_factory=dict)
    tuned: TunedThreshold | None = None
    note: str = ""
    frontier: Frontier | None = field(default=None, repr=False)
    needs: FloatArray = field(default_factory=lambda: np.empty(0), repr=False)
    right: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    drawn: dict[str, FloatArray] = field(default_factory=dict, repr=False)  # value and resamples of each measure
    far: float | None = None  # share of questions far from those the gate was fitted on
    drafts: bool = True  # whether a retrieved question pays for a draft as well
    extra_tokens: float = 0.0  # generated per question beside the draft


def measure_gates(trial: LabelTable, gates: Sequence[TableScores], draws: Bootstrap) -> list[GateResult]:
    """All gates on the same resamples."""
    judged = [GradedNeeds(gate.needs, gate.threshold, trial.closed_right, trial.open_right) for gate in gates]
    drawn = (
        draws.apply([_measures(one) for one in judged])
        if draws.n <= MAX_EXACT_QUESTIONS
        else _draw_cells(judged, draws)
    )
    return [_result(trial, gate, values) for gate, values in zip(gates, drawn, strict=True)]


def _draw_cells(gates: Sequence[GradedNeeds], draws: Bootstrap) -> list[dict[str, FloatArray]]:
    """Of very many questions: values of the questions themselves, resamples of cells (see `cells`).

    What cells make of a measure of all questions, against its value, is taken off every resample.
    """
    plain = [_measures(one)(unit_weights(draws.n)) for one in gates]
    cells = [group_into_cells(one) for one in gates]
    measures = [each.measure(_measures(each.judged)) for each in cells]
    drawn = draws.resample(measures)
    return [
        {name: np.concatenate([value, *([some[name] - off[name] + value] if some else [])])
         for off in [measure(unit_weights(draws.n))] for name, value in values.items()}
        for values, some, measure in zip(plain, drawn, measures, strict=True)
    ]  # fmt: skip


def _measures(judged: GradedNeeds) -> WeightedMetric:
    """Everything about one gate that a bootstrap resample has a value of."""
    ranking, decisions = _ranking(judged), _decisions(judged)
    return lambda weights: {**ranking(weights), **(decisions(weights) if decisions else {})}


def _result(trial: LabelTable, gate: TableScores, drawn: dict[str, FloatArray]) -> GateResult:
    retrieve = gate.needs > gate.threshold
    right, curve, at_rate, tuned = trial.closed_right, None, {}, None
    if trial.open_right is not None:
        right = np.where(retrieve, trial.open_right, trial.closed_right)
        curve = compute_frontier(trial.closed_right, trial.open_right, gate.needs)
        at_rate = {rate: curve.at(rate) for rate in RETRIEVAL_RATES}
        tuned = tune_threshold(trial, trial.open_right, gate.needs)
    measures = {name: summarize_resamples(values) for name, values in drawn.items()}
    cost = _cost(trial, gate, retrieve)
    return GateResult(
        gate.name, gate.threshold, measures, cost, at_rate, tuned, gate.note, curve, gate.needs, right, drawn, gate.far,
        gate.drafts, gate.extra_tokens,
    )  # fmt: skip


def _ranking(judged: GradedNeeds) -> WeightedMetric:
    """How well need tells what the LLM does not know, and where retrieval helps; whatever the threshold."""
    unknown, needs, ranked = ~judged.closed, judged.needs, NeedRanking(judged.needs)
    helped = judged.opened & unknown if judged.opened is not None else None
    told = judged.retrieve == unknown

    def measure(weights: WeightMatrix) -> dict[str, FloatArray]:
        drawn = ranked.sort(weights)
        values = {"auroc": ranked.auroc(drawn, unknown), **ranked.precision_and_risk(drawn, unknown)}
        values["ece"] = weighted_ece(weights, unknown, needs)
        values["brier"] = weighted_brier(weights, unknown, needs)
        values["judged"] = weighted_mean(weights, told)
        return values if helped is None else {**values, "auroc_benefit": ranked.auroc(drawn, helped)}

    return measure


def _decisions(judged: GradedNeeds) -> WeightedMetric | None:
    """What the decisions at the gate's threshold come to; needs open-book answers."""
    if judged.opened is None:
        return None
    closed_right, open_right, retrieve = judged.closed, judged.opened, judged.retrieve
    columns = {
        "accuracy": np.where(retrieve, open_right, closed_right),
        "rate": retrieve,
        "never": closed_right,
        "always": open_right,
        "oracle": closed_right | open_right,
        "harm": ~retrieve & open_right & ~closed_right,
        "waste": retrieve & closed_right,
        "skipped_right": ~retrieve & closed_right,
    }
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)
    return lambda weights: _derived(dict(zip(columns, weighted_mean(weights, table).T, strict=True)))


def _derived(means: dict[str, FloatArray]) -> dict[str, FloatArray]:
    random = means["rate"] * means["always"] + (1 - means["rate"]) * means["never"]
    return {
        **{name: means[name] for name in ("accuracy", "rate", "harm", "waste")},
        "random": random,
        "gain": means["accuracy"] - random,
        "loss": means["always"] - means["accuracy"],
        "recovered": safe_divide(means["accuracy"] - means["never"], means["oracle"] - means["never"]),
        "closed_if_known": safe_divide(means["skipped_right"], 1 - means["rate"]),
        "closed_if_unknown": safe_divide(means["waste"], means["rate"]),
    }


def tune_threshold(trial: LabelTable, open_right: BoolArray, needs: FloatArray) -> TunedThreshold | None:
    """The threshold for accuracy on the dev rows, tried on the rows it has not seen."""
    dev, outcomes = trial.is_dev, GateOutcomes(needs, trial.closed_right, open_right)
    if not dev.any() or dev.all():
        return None
    threshold = choose_for_accuracy(outcomes.at(dev))
    rest = evaluate_threshold(outcomes.at(~dev), threshold)
    always, never = rest.right_always / rest.n, rest.right_never / rest.n
    return TunedThreshold(
        threshold=threshold,
        dev_accuracy=evaluate_threshold(outcomes.at(dev), threshold).accuracy,
        accuracy=rest.accuracy,
        rate=rest.rate,
        random=rest.rate * always + (1 - rest.rate) * never,
        always=always,
        n=rest.n,
    )


def _cost(trial: LabelTable, gate: TableScores, retrieve: BoolArray) -> GateCost:
    """A skipped question goes on with its draft; a retrieved one pays for the draft it read, and an answer more."""
    closed, opened = trial.closed_tokens, trial.open_tokens
    drafted = closed if gate.drafts else np.zeros_like(closed)
    tokens = np.where(retrieve, drafted + opened, closed).mean() + gate.extra_tokens
    rate = float(retrieve.mean())
    calls = 1 + gate.calls + (rate if gate.drafts else 0.0)
    return GateCost(calls, rate, float(tokens) if trial.has_answer_lengths else None, gate.seconds)


def build_baselines(trial: LabelTable) -> list[TableScores]:
    """What every table has beside the gates: never, always and the oracle. They rank nothing."""
    if trial.open_right is None:
        return []
    n, helps = len(trial.rows), trial.open_right & ~trial.closed_right
    return [
        TableScores("never", np.zeros(n), 0.5, drafts=False, note="answers closed-book"),
        TableScores("always", np.ones(n), 0.5, drafts=False, note="retrieves every time"),
        TableScores(
            "oracle", helps.astype(float), 0.5, drafts=False, note="knows both answers: the ceiling, not a gate"
        ),
    ]


def compute_majority_share(trial: LabelTable) -> float:
    """How often the commoner verdict, the same for every question, is right: what a verdict must beat."""
    known = float(trial.closed_right.mean())
    return max(known, 1 - known)


def make_baseline_result(trial: LabelTable, result: GateResult) -> GateResult:
    """A line's result without measures of rank; the oracle's curve takes the best order there is."""
    shown = {name: value for name, value in result.measures.items() if name in DECISION_MEASURES}
    if result.gate != "oracle" or trial.open_right is None:
        return replace(result, measures=shown, tuned=None)
    best = compute_oracle_frontier(trial.closed_right, trial.open_right)
    return replace(
        result, measures=shown, tuned=None, frontier=best, at_rate={rate: best.at(rate) for rate in RETRIEVAL_RATES}
    )


def measure_slice(
    trial: LabelTable, gates: Sequence[GateResult], inside: BoolArray
) -> list[tuple[str, float, float, float]]:
    """(gate, accuracy, retrieval rate, matched random) on some of the rows."""
    if trial.open_right is None or not inside.any():
        return []
    closed_right, open_right = trial.closed_right[inside], trial.open_right[inside]
    rows = []
    for gate in gates:
        rate = float((gate.needs[inside] > gate.threshold).mean())
        chance = rate * open_right.mean() + (1 - rate) * closed_right.mean()
        rows.append((gate.gate, float(gate.right[inside].mean()), rate, float(chance)))
    return rows
