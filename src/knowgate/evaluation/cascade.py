"""The cascade on recorded rows: skip, or retrieve and let an arbiter choose. Each gate with and without the arbiter.

The arbiter is asked once for each run; what it believed is kept beside the rows and read from there the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from knowgate.arbiters import ArbiterChoices
from knowgate.display import Sheet, percent, points_with_interval, share_with_interval
from knowgate.evaluation.comparison.frontier import frontier
from knowgate.gates import GateScores
from knowgate.runs import Trial
from knowgate.statistics import Bools, Draws, Estimate, Weights, estimate, mcnemar, weighted_mean

CASCADE_RATES: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)  # retrieval rates whose accuracy the table shows


@dataclass(frozen=True)
class CascadeLine:
    """One gate before the arbiter. accuracy: of the cascade; alone: of the gate without arbiter.

    against_always: accuracy minus that of always giving the open-book answer, with McNemar's p of the two.
    harmed, gained: share of questions that one has right and the other wrong. at_rate: accuracy of the cascade when so
    many questions, those of highest need, are retrieved for. right: the cascade's answer to each question.
    """

    gate: str
    rate: float
    alone: float
    accuracy: Estimate
    change: Estimate
    against_always: Estimate
    p_mcnemar: float
    harmed: float
    gained: float
    at_rate: dict[float, float]
    right: Bools = field(repr=False, compare=False)


@dataclass(frozen=True)
class Cascade:
    """What an arbiter does behind every gate. from_memory: how often it gives that answer if all are retrieved for."""

    arbiter: str
    fingerprint: str
    from_memory: float
    lines: list[CascadeLine]


def cascade_of(trial: Trial, gates: Sequence[GateScores], choices: ArbiterChoices, draws: Draws) -> Cascade:
    """Every gate, and always retrieving, with this arbiter behind it."""
    lines = [_line(trial, gate, choices.right, draws) for gate in gates]
    return Cascade(choices.name, choices.fingerprint, float(choices.from_memory.mean()), lines)


def _line(trial: Trial, gate: GateScores, given: Bools, draws: Draws) -> CascadeLine:
    closed, opened, retrieve = trial.closed_right, trial.always_right, gate.needs > gate.threshold
    alone, right = np.where(retrieve, opened, closed), np.where(retrieve, given, closed)
    table = np.stack([right, right.astype(float) - alone, right.astype(float) - opened], axis=1).astype(np.float64)

    def measure(weights: Weights) -> dict[str, np.ndarray]:
        return dict(zip(("accuracy", "change", "against"), weighted_mean(weights, table).T, strict=True))

    drawn = draws.apply([measure])[0]
    curve = frontier(closed, given, gate.needs)
    p, gained, harmed = mcnemar(right, opened)
    n = len(right)
    return CascadeLine(
        gate.name,
        float(retrieve.mean()),
        float(alone.mean()),
        estimate(drawn["accuracy"]),
        estimate(drawn["change"]),
        estimate(drawn["against"]),
        p,
        harmed / n,
        gained / n,
        {rate: curve.at(rate) for rate in CASCADE_RATES},
        right,
    )


def cascade_sheet(cascade: Cascade) -> Sheet:
    """Every gate with the arbiter behind it; 'always' is the arbiter alone."""
    columns = (
        "gate", "retrieval", "accuracy, no arbiter", "accuracy, cascade", "change", "against always", "p", "harmed",
        "gained", *(f"cascade at {rate:.0%}" for rate in CASCADE_RATES),
    )  # fmt: skip
    rows = tuple(_row(line) for line in cascade.lines)
    return Sheet(f"Cascade: the arbiter {cascade.arbiter} chooses after retrieval", columns, rows)


def _row(line: CascadeLine) -> tuple[str, ...]:
    return (
        line.gate,
        percent(line.rate),
        percent(line.alone),
        share_with_interval(line.accuracy),
        points_with_interval(line.change),
        points_with_interval(line.against_always),
        "< 0.001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}",
        percent(line.harmed),
        percent(line.gained),
        *(percent(value) for value in line.at_rate.values()),
    )
