"""Differences between two evaluations, gate by gate: before and after a change, two LLMs, two indexes.

Differences are paired if both evaluations share enough questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.evaluation_summary import ARBITER_SUFFIX, RECOMMENDED, EvaluationSummary, GateSummary
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Estimate, estimate_means
from knowgate.stats.metrics import BoolArray

MIN_SHARED_QUESTIONS = 30
# The questions that two evaluations share: their row numbers in the first, and in the second evaluation.
RowPairs = tuple[NDArray[np.int64], NDArray[np.int64]]
DEFAULT_WATCHED = ("never", "always", RECOMMENDED)


@dataclass(frozen=True)
class MeasureDiff:
    """A measure, such as accuracy, of the same gate in two evaluations.

    Attributes:
        first: Its value in the first evaluation.
        second: Its value in the second evaluation.
        difference: The second value minus the first.
    """

    first: Estimate
    second: Estimate
    difference: Estimate


@dataclass(frozen=True)
class GateDiff:
    """The measures of one gate in two evaluations.

    Attributes:
        gate: Name of the gate.
        changes: By name, each measure that both evaluations have: 'accuracy', 'rate' (of retrieval) and 'auroc'.
    """

    gate: str
    changes: dict[str, MeasureDiff]


@dataclass(frozen=True)
class EvaluationDiff:
    """Differences between two evaluations.

    Attributes:
        first: The evaluation to compare with.
        second: The evaluation to compare.
        gates: Gates that both evaluations have.
        watched: Names of the gates whose accuracy decides whether the second evaluation is better or worse.
        only_first: Names of gates that only the first evaluation has.
        only_second: Names of gates that only the second evaluation has.
        shared: Number of questions that both evaluations have.
        needed: Number of shared questions required to compare gates question by question.
    """

    first: EvaluationSummary
    second: EvaluationSummary
    gates: list[GateDiff]
    watched: list[str]
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shared: int = 0
    needed: int = 0

    @property
    def paired(self) -> int:
        """Number of questions compared one by one. 0 if the evaluations share too few questions."""
        return self.shared if self.shared >= self.needed else 0

    @property
    def watched_differences(self) -> dict[str, Estimate]:
        """Change in accuracy of each watched gate."""
        watched = [gate for gate in self.gates if gate.gate in self.watched and "accuracy" in gate.changes]
        return {gate.gate: gate.changes["accuracy"].difference for gate in watched}

    def find_worse(self, tolerance: float) -> list[str]:
        """Return the watched gates whose accuracy fell by more than `tolerance`, with an interval below 0."""
        fallen = {gate: change for gate, change in self.watched_differences.items() if is_certain_fall(change)}
        return [gate for gate, change in fallen.items() if change.value is not None and change.value < -tolerance]


def is_certain_fall(difference: Estimate) -> bool:
    """Return whether the whole interval of a difference is below 0."""
    return difference.high is not None and difference.high < 0


def diff_evaluations(
    first: EvaluationSummary, second: EvaluationSummary, watch: Sequence[str] = (), resamples: int = DEFAULT_RESAMPLES
) -> EvaluationDiff:
    """Compare two evaluations, gate by gate. Gates that only one of them has are listed by name.

    Args:
        first: The evaluation to compare with.
        second: The evaluation to compare.
        watch: Names of the gates that decide which evaluation is better. Default: the gates `never` and `always`, the
            recommended policy, and every gate with an arbiter (it picks the answer with or without passages).
        resamples: Number of bootstrap resamples of paired differences.

    Raises:
        BadInput: The evaluations have no gate in common.
        UnknownName: A watched gate is missing from one of them.
    """
    gates = [gate for gate in first.gates if gate in second.gates]
    if not gates:
        raise BadInput(f"'{first.name}' and '{second.name}' have no common gate. Evaluate both with the same `gates`.")
    watched = _select_watched(gates, watch)
    shared_rows = _find_shared_questions(first, second)
    n_shared = len(shared_rows[0])
    n_needed = _count_needed_questions(first, second)
    paired_rows = shared_rows if n_shared >= n_needed else None  # None: the gates are not compared by question
    return EvaluationDiff(
        first,
        second,
        gates=[_diff_gate(gate, first.gates[gate], second.gates[gate], paired_rows, resamples) for gate in gates],
        watched=watched,
        only_first=[gate for gate in first.gates if gate not in gates],
        only_second=[gate for gate in second.gates if gate not in gates],
        shared=n_shared,
        needed=n_needed,
    )


def _count_needed_questions(first: EvaluationSummary, second: EvaluationSummary) -> int:
    """Return how many shared questions are needed to compare two evaluations question by question."""
    n_smaller = min(len(set(first.question_keys)), len(set(second.question_keys)))
    return max(MIN_SHARED_QUESTIONS, math.ceil(n_smaller / 2))


def _select_watched(gates: Sequence[str], watch: Sequence[str]) -> list[str]:
    """Select the gates to watch. A gate in `watch` is watched with and without an arbiter."""
    for gate in watch:
        if gate not in gates:
            raise UnknownName("gate", gate, gates)
    if watch:
        return [gate for gate in gates if gate in watch or gate.removesuffix(ARBITER_SUFFIX) in watch]
    return [gate for gate in gates if gate in DEFAULT_WATCHED or gate.endswith(ARBITER_SUFFIX)]


def diff_to_dict(diff: EvaluationDiff) -> dict[str, Any]:
    """Convert the differences between two evaluations to plain data, for JSON."""
    sides = {
        name: {"name": side.name, "model": side.model, "questions": side.n, "recommended": side.recommendation}
        for name, side in (("first", diff.first), ("second", diff.second))
    }
    copied = ("paired", "shared", "needed", "watched", "only_first", "only_second")
    values = {name: getattr(diff, name) for name in copied}
    return {**sides, **values, "gates": [asdict(gate) for gate in diff.gates]}


def _find_shared_questions(first: EvaluationSummary, second: EvaluationSummary) -> RowPairs:
    """Return the row numbers of the shared questions in both evaluations."""
    first_keys = np.array(first.question_keys, dtype=str)
    second_keys = np.array(second.question_keys, dtype=str)
    _, first_rows, second_rows = np.intersect1d(first_keys, second_keys, return_indices=True)
    return first_rows, second_rows


def _diff_gate(name: str, first: GateSummary, second: GateSummary, shared: RowPairs | None, resamples: int) -> GateDiff:
    """Compare each measure of a gate, such as its accuracy, in two evaluations.

    Outcomes of single questions are compared on the `shared` questions, if they are known.
    """
    outcomes = {"accuracy": (first.right, second.right), "rate": (first.searched, second.searched)}  # of each question
    changes = {}
    for measure in [name for name in first.measures if name in second.measures]:
        first_outcomes, second_outcomes = outcomes.get(measure, (None, None))
        if shared is None or first_outcomes is None or second_outcomes is None:
            changes[measure] = _diff_independent(first.measures[measure], second.measures[measure])
        else:
            first_rows, second_rows = shared
            changes[measure] = _diff_paired(first_outcomes[first_rows], second_outcomes[second_rows], resamples)
    return GateDiff(name, changes)


def _diff_paired(first: BoolArray, second: BoolArray, resamples: int) -> MeasureDiff:
    """Compare yes-or-no outcomes of two evaluations on the same questions.

    Both evaluations are resampled together. This makes the interval of the difference narrower.
    """
    columns = [first.astype(float), second.astype(float), second.astype(float) - first]
    first_mean, second_mean, difference = estimate_means(columns, resamples)
    return MeasureDiff(first_mean, second_mean, difference)


def _diff_independent(first: Estimate, second: Estimate) -> MeasureDiff:
    """Compare estimates from different questions. Variances add up, so the half-widths are added as squares."""
    if first.value is None or second.value is None:
        return MeasureDiff(first, second, Estimate(None))
    difference = second.value - first.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return MeasureDiff(first, second, Estimate(difference))
    half_width = math.hypot((first.high - first.low) / 2, (second.high - second.low) / 2)
    return MeasureDiff(first, second, Estimate(difference, difference - half_width, difference + half_width))
