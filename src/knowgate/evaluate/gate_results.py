"""What a gate's decisions come to: accuracy, cost, ranking and calibration, each with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from knowgate.evaluate import weighted
from knowgate.evaluate.frontier import Frontier, frontier, oracle_frontier
from knowgate.evaluate.resample import Draws, Estimate, estimate
from knowgate.evaluate.scoring import Scored
from knowgate.evaluate.trial import Trial
from knowgate.evaluate.weighted import Bools, Floats, Ranked, Weights, divided

RATES = (0.9, 0.75, 0.5, 0.25)  # retrieval rates whose accuracy the tables show
DECISION_MEASURES = ("accuracy", "rate", "random", "gain", "loss", "harm", "waste", "recovered")


@dataclass(frozen=True)
class Tuned:
    """A threshold chosen for accuracy on the dev rows, and what it came to on the others."""

    threshold: float
    dev_accuracy: float
    accuracy: float
    rate: float
    random: float
    always: float
    n: int


@dataclass(frozen=True)
class Cost:
    """Per question. seconds: of the decision, None if it was not timed."""

    calls: float
    retrievals: float
    tokens: float
    seconds: float | None


@dataclass(frozen=True)
class GateResult:
    """Everything about one gate on one trial. Measures that need open-book answers are absent without them."""

    gate: str
    threshold: float
    measures: dict[str, Estimate]
    cost: Cost
    at_rate: dict[float, float] = field(default_factory=dict)
    tuned: Tuned | None = None
    note: str = ""
    frontier: Frontier | None = field(default=None, repr=False)
    needs: Floats = field(default_factory=lambda: np.empty(0), repr=False)
    right: Bools = field(default_factory=lambda: np.empty(0, dtype=bool), repr=False)
    drawn: dict[str, Floats] = field(default_factory=dict, repr=False)  # value and resamples of each measure


def measure_gate(trial: Trial, gate: Scored, draws: Draws) -> GateResult:
    retrieve = gate.needs > gate.threshold
    drawn = _ranking(trial, gate, draws)
    right = trial.closed
    curve, at_rate, tuned = None, {}, None
    if trial.opened is not None:
        right = np.where(retrieve, trial.opened, trial.closed)
        drawn |= _decisions(trial, trial.opened, retrieve, right, draws)
        curve = frontier(trial.closed, trial.opened, gate.needs)
        at_rate = {rate: curve.at(rate) for rate in RATES}
        tuned = tune(trial, trial.opened, gate.needs)
    found = {name: estimate(values) for name, values in drawn.items()}
    cost = _cost(trial, gate, retrieve)
    return GateResult(
        gate.name, gate.threshold, found, cost, at_rate, tuned, gate.note, curve, gate.needs, right, drawn
    )


def _ranking(trial: Trial, gate: Scored, draws: Draws) -> dict[str, Floats]:
    """How well need tells what the LLM does not know, and where retrieval helps; whatever the threshold."""
    unknown, needs = ~trial.closed, gate.needs
    ranked = Ranked(unknown, needs)
    helped = Ranked(trial.opened & unknown, needs) if trial.opened is not None else None
    parts: dict[str, list[Floats]] = {}
    for weights in draws.portions():
        values = ranked.measures(weights)
        values["ece"] = weighted.ece(weights, unknown, needs)
        values["brier"] = weighted.brier(weights, unknown, needs)
        if helped is not None:
            values["auroc_benefit"] = helped.measures(weights)["auroc"]
        for name, value in values.items():
            parts.setdefault(name, []).append(value)
    return {name: np.concatenate(found) for name, found in parts.items()}


def _decisions(trial: Trial, opened: Bools, retrieve: Bools, right: Bools, draws: Draws) -> dict[str, Floats]:
    closed = trial.closed
    columns = {
        "accuracy": right,
        "rate": retrieve,
        "never": closed,
        "always": opened,
        "oracle": closed | opened,
        "harm": ~retrieve & opened & ~closed,
        "waste": retrieve & closed,
        "skipped_right": ~retrieve & closed,
        "retrieved_right": retrieve & closed,
    }
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)
    parts = [mean_columns(weights, table) for weights in draws.portions()]
    means = dict(zip(columns, np.concatenate(parts).T, strict=True))
    random = means["rate"] * means["always"] + (1 - means["rate"]) * means["never"]
    return {
        **{name: means[name] for name in ("accuracy", "rate", "harm", "waste")},
        "random": random,
        "gain": means["accuracy"] - random,
        "loss": means["always"] - means["accuracy"],
        "recovered": divided(means["accuracy"] - means["never"], means["oracle"] - means["never"]),
        "closed_if_known": divided(means["skipped_right"], 1 - means["rate"]),
        "closed_if_unknown": divided(means["retrieved_right"], means["rate"]),
    }


def mean_columns(weights: Weights, table: Floats) -> Floats:
    """The weighted mean of every column, for every resample."""
    total = weights.sum(axis=1, dtype=np.float64)[:, None]
    found: Floats = (weights @ table.astype(np.float32)).astype(np.float64) / total
    return found


def tune(trial: Trial, opened: Bools, needs: Floats) -> Tuned | None:
    """The threshold that answers most dev rows right (fewest retrievals among equals), on the rows it has not seen."""
    dev, closed = trial.dev, trial.closed
    if not dev.any() or dev.all():
        return None
    tried = np.unique(np.concatenate([[-1.0], needs[dev]]))  # -1: below every need, always retrieve
    scores = [np.where(needs[dev] > t, opened[dev], closed[dev]).mean() for t in tried]
    best = int(np.flatnonzero(np.isclose(scores, max(scores)))[-1])
    rest = ~dev
    retrieve = needs[rest] > tried[best]
    rate, always, never = retrieve.mean(), opened[rest].mean(), closed[rest].mean()
    return Tuned(
        threshold=float(tried[best]),
        dev_accuracy=float(scores[best]),
        accuracy=float(np.where(retrieve, opened[rest], closed[rest]).mean()),
        rate=float(rate),
        random=float(rate * always + (1 - rate) * never),
        always=float(always),
        n=int(rest.sum()),
    )


def _cost(trial: Trial, gate: Scored, retrieve: Bools) -> Cost:
    """A skipped question goes on with its draft; a retrieved one pays for the draft it read, and an answer more."""
    closed, opened = trial.closed_tokens(), trial.open_tokens()
    drafted = closed if gate.drafts else np.zeros_like(closed)
    tokens = np.where(retrieve, drafted + opened, closed).mean() + gate.extra_tokens
    rate = float(retrieve.mean())
    calls = 1 + gate.calls + (rate if gate.drafts else 0.0)
    return Cost(calls, rate, float(tokens), gate.seconds)


def never_and_always(trial: Trial, draws: Draws) -> list[GateResult]:
    """The two lines every table has. They rank nothing, so they have no measures of rank."""
    n = len(trial.rows)
    lines = [
        Scored("never", np.zeros(n), 0.5, drafts=False, note="answers closed-book"),
        Scored("always", np.ones(n), 0.5, drafts=False, note="retrieves every time"),
    ]
    return [replace(found, measures=_of_decisions(found)) for found in (measure_gate(trial, x, draws) for x in lines)]


def _of_decisions(result: GateResult) -> dict[str, Estimate]:
    return {name: value for name, value in result.measures.items() if name in DECISION_MEASURES}


def oracle(trial: Trial, opened: Bools, draws: Draws) -> GateResult:
    """Retrieve exactly where it turns a wrong answer right: the ceiling."""
    helps = opened & ~trial.closed
    scored = Scored("oracle", helps.astype(float), 0.5, drafts=False, note="knows both answers; a ceiling, not a gate")
    result = measure_gate(trial, scored, draws)
    best = oracle_frontier(trial.closed, opened)
    shown = _of_decisions(result)
    return GateResult("oracle", 0.5, shown, result.cost, {rate: best.at(rate) for rate in RATES}, None, scored.note,
                      best, scored.needs, result.right, result.drawn)  # fmt: skip


def slice_rows(trial: Trial, gates: Sequence[GateResult], places: Bools) -> list[tuple[str, float, float, float]]:
    """(gate, accuracy, retrieval rate, matched random) on some of the rows."""
    if trial.opened is None or not places.any():
        return []
    closed, opened = trial.closed[places], trial.opened[places]
    found = []
    for gate in gates:
        rate = float((gate.needs[places] > gate.threshold).mean())
        chance = rate * opened.mean() + (1 - rate) * closed.mean()
        found.append((gate.gate, float(gate.right[places].mean()), rate, float(chance)))
    return found
