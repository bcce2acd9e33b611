"""Skip, retrieve once, or several times: each question gets the action with the highest expected gain.

P(right) of each action is a function of the gate's need, fitted on the dev rows (Platt's two numbers) and tried on the
others. An action is worth its P(right) less the price of its searches, counted in right answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.display import Sheet, percent, points_with_interval, share_with_interval
from knowgate.errors import BadSetting
from knowgate.gates import GateScores, to_probability
from knowgate.runs import USUAL_ROUNDS, Trial
from knowgate.statistics import Bools, Draws, Estimate, Floats, Weights, estimate, mcnemar, weighted_mean

ACTIONS = ("skip", "one", "several")
PRICES: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)  # of a search, in right answers


@dataclass(frozen=True)
class ActionLine:
    """What one price comes to. shares: of the questions that each action gets, in the order of ACTIONS."""

    gate: str
    price: float
    shares: tuple[float, ...]
    searches: float
    accuracy: Estimate
    against_always: Estimate
    p_mcnemar: float


@dataclass(frozen=True)
class ActionRows:
    """Questions with whether each action's answer is right, a column each, and how many searches each action takes."""

    needs: Floats
    right: Bools
    open_right: Bools
    searches: tuple[float, ...] = (0.0, 1.0, USUAL_ROUNDS)

    def at(self, rows: Bools) -> ActionRows:
        return ActionRows(self.needs[rows], self.right[rows], self.open_right[rows], self.searches)


def expected(fitted_on: ActionRows, needs: Floats) -> Floats:
    """P(right) of each action for these needs."""
    from knowgate.fitting import fit_calibration  # loads scikit-learn: seconds that no other evaluation needs

    surety = 1 - fitted_on.needs
    maps = [fit_calibration(surety, column) for column in fitted_on.right.T]
    shares = fitted_on.right.mean(axis=0)  # where all or none are right there is nothing to fit
    columns = [
        to_probability(1 - needs, one) if one["kind"] != "none" else np.full(len(needs), share)
        for one, share in zip(maps, shares, strict=True)
    ]
    return np.stack(columns, axis=1)


def choose_actions(chances: Floats, searches: Sequence[float], price: float) -> NDArray[np.int64]:
    """The number of the best action for each question; of equally good ones the one that searches least."""
    best: NDArray[np.int64] = np.argmax(chances - price * np.asarray(searches), axis=1)
    return best


def action_lines(
    name: str, fitted_on: ActionRows, tried_on: ActionRows, prices: Sequence[float], draws: Draws
) -> list[ActionLine]:
    """Each price in turn, on questions that nothing was fitted on."""
    chances = expected(fitted_on, tried_on.needs)
    return [_line(name, tried_on, choose_actions(chances, tried_on.searches, one), one, draws) for one in prices]


def _line(name: str, rows: ActionRows, chosen: NDArray[np.int64], price: float, draws: Draws) -> ActionLine:
    right = rows.right[np.arange(len(chosen)), chosen]
    table = np.stack([right.astype(float), right.astype(float) - rows.open_right], axis=1)

    def measure(weights: Weights) -> dict[str, Floats]:
        return dict(zip(("accuracy", "against"), weighted_mean(weights, table).T, strict=True))

    drawn = draws.apply([measure])[0]
    shares = tuple(float((chosen == number).mean()) for number in range(len(ACTIONS)))
    searches = float(np.asarray(rows.searches)[chosen].mean())
    p, _, _ = mcnemar(right, rows.open_right)
    return ActionLine(name, price, shares, searches, estimate(drawn["accuracy"]), estimate(drawn["against"]), p)


def actions_of(
    trial: Trial, gates: Sequence[GateScores], given: Bools, prices: Sequence[float], resamples: int, seed: int
) -> list[ActionLine]:
    """Every gate at every price; the rows must hold answers after several rounds of retrieval. given: after one."""
    several = trial.iterative_right
    if several is None:
        raise BadSetting(
            "--price-retrieval chooses between skipping, one retrieval and several, and no row has an answer after "
            "several rounds. Label with --iterative, or import such answers: knowgate import-answers --iterative KEY"
        )
    dev = trial.dev
    if not dev.any() or dev.all():
        raise BadSetting(
            f"{len(trial.rows)} questions are too few to fit expected gains on some and try them on others. Label more."
        )
    right = np.stack([trial.closed_right, given, several], axis=1)
    draws, lines = Draws(int((~dev).sum()), resamples, seed), list[ActionLine]()
    for gate in gates:
        rows = ActionRows(gate.needs, right, trial.always_right, (0.0, 1.0, trial.rounds))
        lines += action_lines(gate.name, rows.at(dev), rows.at(~dev), prices, draws)
    return lines


def action_sheet(lines: Sequence[ActionLine]) -> Sheet:
    columns = (
        "gate", "price of a search", "skip", "one retrieval", "several", "searches", "accuracy, three actions",
        "against always once", "p",
    )  # fmt: skip
    return Sheet("Skip, retrieve once, or several times", columns, tuple(_row(line) for line in lines))


def _row(line: ActionLine) -> tuple[str, ...]:
    return (
        line.gate,
        f"{line.price:g}",
        *(percent(share) for share in line.shares),
        f"{line.searches:.2f}",
        share_with_interval(line.accuracy),
        points_with_interval(line.against_always),
        "< 0.001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}",
    )
