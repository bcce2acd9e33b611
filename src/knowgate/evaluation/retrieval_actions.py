"""Skip, retrieve once, or several times: each question gets the action with the highest expected gain.

P(right) of each action is a function of the gate's need, fitted on the dev rows (Platt's two numbers) and tried on the
others. An action is worth its P(right) less the price of its searches, counted in right answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import TextTable, format_percent
from knowgate.data.runs.table import DEFAULT_ROUNDS, LabelTable
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.offline_scoring import TableScores
from knowgate.stats.bootstrap import Bootstrap, Estimate, summarize_resamples
from knowgate.stats.formats import format_percent_estimate, format_points_estimate
from knowgate.stats.metrics import BoolArray, FloatArray, WeightMatrix, weighted_mean
from knowgate.stats.proportions import mcnemar_test

ACTIONS = ("skip", "one", "several")
SEARCH_PRICES: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)  # of a search, in right answers


@dataclass(frozen=True)
class ActionResult:
    """What one price comes to. shares: of the questions that each action gets, in the order of ACTIONS."""

    gate: str
    price: float
    shares: tuple[float, ...]
    searches: float
    accuracy: Estimate
    against_always: Estimate
    p_mcnemar: float


@dataclass(frozen=True)
class ActionOutcomes:
    """Questions with whether each action's answer is right, a column each, and how many searches each action takes."""

    needs: FloatArray
    right: BoolArray
    open_right: BoolArray
    searches: tuple[float, ...] = (0.0, 1.0, DEFAULT_ROUNDS)

    def at(self, rows: BoolArray) -> ActionOutcomes:
        return ActionOutcomes(self.needs[rows], self.right[rows], self.open_right[rows], self.searches)


def predict_action_success(fitted_on: ActionOutcomes, needs: FloatArray) -> FloatArray:
    """P(right) of each action for these needs."""
    from knowgate.training.classifiers import fit_platt_scaling

    surety = 1 - fitted_on.needs
    maps = [fit_platt_scaling(surety, column) for column in fitted_on.right.T]
    shares = fitted_on.right.mean(axis=0)  # where all or none are right there is nothing to fit
    columns = [
        apply_calibration(1 - needs, one) if one["kind"] != "none" else np.full(len(needs), share)
        for one, share in zip(maps, shares, strict=True)
    ]
    return np.stack(columns, axis=1)


def choose_actions(chances: FloatArray, searches: Sequence[float], price: float) -> NDArray[np.int64]:
    """The number of the best action for each question; of equally good ones the one that searches least."""
    best: NDArray[np.int64] = np.argmax(chances - price * np.asarray(searches), axis=1)
    return best


def measure_actions(
    name: str, fitted_on: ActionOutcomes, tried_on: ActionOutcomes, prices: Sequence[float], draws: Bootstrap
) -> list[ActionResult]:
    """Each price in turn, on questions that nothing was fitted on."""
    chances = predict_action_success(fitted_on, tried_on.needs)
    return [_line(name, tried_on, choose_actions(chances, tried_on.searches, one), one, draws) for one in prices]


def _line(name: str, rows: ActionOutcomes, chosen: NDArray[np.int64], price: float, draws: Bootstrap) -> ActionResult:
    right = rows.right[np.arange(len(chosen)), chosen]
    table = np.stack([right.astype(float), right.astype(float) - rows.open_right], axis=1)

    def measure(weights: WeightMatrix) -> dict[str, FloatArray]:
        return dict(zip(("accuracy", "against"), weighted_mean(weights, table).T, strict=True))

    drawn = draws.apply([measure])[0]
    shares = tuple(float((chosen == number).mean()) for number in range(len(ACTIONS)))
    searches = float(np.asarray(rows.searches)[chosen].mean())
    p, _, _ = mcnemar_test(right, rows.open_right)
    return ActionResult(
        name, price, shares, searches, summarize_resamples(drawn["accuracy"]), summarize_resamples(drawn["against"]), p
    )


def evaluate_actions(
    trial: LabelTable,
    gates: Sequence[TableScores],
    given: BoolArray,
    prices: Sequence[float],
    resamples: int,
    seed: int,
) -> list[ActionResult]:
    """Every gate at every price; the rows must hold answers after several rounds of retrieval. given: after one."""
    several = trial.iterative_right
    if several is None:
        raise BadSetting(
            "--price-retrieval chooses between skipping, one retrieval and several, and no row has an answer after "
            "several rounds. Label with --iterative, or import such answers: knowgate import-answers --iterative KEY"
        )
    dev = trial.is_dev
    if not dev.any() or dev.all():
        raise BadSetting(
            f"{len(trial.rows)} questions are too few to fit expected gains on some and try them on others. Label more."
        )
    right = np.stack([trial.closed_right, given, several], axis=1)
    draws, lines = Bootstrap(int((~dev).sum()), resamples, seed), list[ActionResult]()
    for gate in gates:
        rows = ActionOutcomes(gate.needs, right, trial.always_right, (0.0, 1.0, trial.mean_rounds))
        lines += measure_actions(gate.name, rows.at(dev), rows.at(~dev), prices, draws)
    return lines


def build_action_table(lines: Sequence[ActionResult]) -> TextTable:
    columns = (
        "gate", "price of a search", "skip", "one retrieval", "several", "searches", "accuracy, three actions",
        "against always once", "p",
    )  # fmt: skip
    return TextTable("Skip, retrieve once, or several times", columns, tuple(_row(line) for line in lines))


def _row(line: ActionResult) -> tuple[str, ...]:
    return (
        line.gate,
        f"{line.price:g}",
        *(format_percent(share) for share in line.shares),
        f"{line.searches:.2f}",
        format_percent_estimate(line.accuracy),
        format_points_estimate(line.against_always),
        "< 0.001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}",
    )
