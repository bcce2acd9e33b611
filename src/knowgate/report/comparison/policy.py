"""The decisions that the page of an evaluation looks at closely: those recommended, else those of the best gate."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from knowgate.evaluation import Evaluation, GateResult, Recommendation
from knowgate.gates import GATES
from knowgate.statistics import Bools


@dataclass(frozen=True)
class Policy:
    """A gate at a threshold: which questions it skips, and which of its final answers are right."""

    gate: GateResult
    threshold: float
    skips: Bools = field(repr=False)
    right: Bools = field(repr=False)
    is_recommended: bool = True

    @property
    def name(self) -> str:
        return f"'{self.gate.gate}' at {self.threshold:.3g}"


def policy_of(evaluation: Evaluation, advice: Recommendation) -> Policy | None:
    """None where no gate was evaluated that ranks questions, or no question has both answers."""
    if evaluation.trial.open_right is None:
        return None
    if advice.gate is not None and not advice.does_without and advice.threshold is not None:
        gate = evaluation.gate(advice.gate)
        return Policy(gate, advice.threshold, advice.skips, advice.right, advice.is_worth_it)
    best = best_gate(evaluation)
    if best is None:
        return None
    return Policy(best, best.threshold, best.needs <= best.threshold, best.right, is_recommended=False)


def ranked_gates(evaluation: Evaluation) -> list[GateResult]:
    """Gates that rank questions, the best first: by the area under their curve, or by AUROC where there is none."""
    gates = [gate for gate in evaluation.gates if "auroc" in gate.measures]
    return sorted(gates, key=_quality, reverse=True)


def _quality(gate: GateResult) -> float:
    return gate.frontier.area if gate.frontier is not None else gate.measures["auroc"].value or 0.0


def best_gate(evaluation: Evaluation) -> GateResult | None:
    return next(iter(ranked_gates(evaluation)), None)


def is_plain(gate: GateResult) -> bool:
    """A gate that needs no fitting: what a fitted one must beat."""
    return gate.gate.partition(":")[0] in GATES


@dataclass(frozen=True)
class Slice:
    """Part of the questions under a policy. changes: of the answers against always retrieving, per question."""

    name: str
    n: int
    skipped: float
    always: float
    changes: np.ndarray[tuple[int], np.dtype[np.float64]] = field(repr=False)


def slices_of(evaluation: Evaluation, policy: Policy, fewest: int) -> list[Slice]:
    """Parts with at least so many questions, of dimensions that split them."""
    opened = evaluation.trial.always_right
    found = []
    for dimension in dict.fromkeys(one.dimension for one in evaluation.slices):
        parts = evaluation.trial.part_of(dimension)
        values = [one.value for one in evaluation.slices if one.dimension == dimension]
        for value in values:
            inside = parts == value
            if inside.sum() >= fewest:
                changes = policy.right[inside].astype(float) - opened[inside]
                skipped, always = float(policy.skips[inside].mean()), float(opened[inside].mean())
                found.append(Slice(f"{dimension}: {value}", int(inside.sum()), skipped, always, changes))
    return found
