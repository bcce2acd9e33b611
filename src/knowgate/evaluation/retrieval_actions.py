"""Choice between skipping, one retrieval and several rounds, by expected gain.

The probability that an action's answer is correct is fitted to the gate's need on the dev rows (Platt scaling) and
tested on the others. An action's gain is that probability minus the price of its searches, in correct answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import TextTable, format_percent
from knowgate.data.runs.table import DEFAULT_ROUNDS, LabelTable
from knowgate.errors import BadSetting
from knowgate.evaluation.gate_results import estimate_column_means
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.offline_scoring import TableScores
from knowgate.stats.bootstrap import Bootstrap, Estimate
from knowgate.stats.formats import format_p_value, format_percent_estimate, format_points_estimate
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import mcnemar_test

ACTIONS = ("skip", "one", "several")
SEARCH_PRICES: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)  # prices of a search, in correct answers


@dataclass(frozen=True)
class ActionResult:
    """Choosing among the three actions at one price of a search.

    Attributes:
        price: Price of a search, in correct answers.
        shares: Share of the questions that get each action, in the order of `ACTIONS`.
        searches: Searches per question.
        against_always: Accuracy minus that of one retrieval for every question.
        p_mcnemar: McNemar's p-value of that difference.
    """

    gate: str
    price: float
    shares: tuple[float, ...]
    searches: float
    accuracy: Estimate
    against_always: Estimate
    p_mcnemar: float


@dataclass(frozen=True)
class ActionOutcomes:
    """Which actions answer each question correctly.

    Attributes:
        needs: The gate's need of each question.
        right: Questions x actions: whether the action's answer is correct.
        open_right: Whether the answer after one plain retrieval is correct.
        searches: Searches that each action makes.
    """

    needs: FloatArray
    right: BoolArray
    open_right: BoolArray
    searches: tuple[float, ...] = (0.0, 1.0, DEFAULT_ROUNDS)

    def select(self, rows: BoolArray) -> ActionOutcomes:
        """Return the outcomes of some of the questions."""
        return ActionOutcomes(self.needs[rows], self.right[rows], self.open_right[rows], self.searches)


def predict_action_success(training: ActionOutcomes, needs: FloatArray) -> FloatArray:
    """Predict the probability that each action answers correctly, from need alone.

    Args:
        training: Outcomes that the probabilities are fitted on.
        needs: Needs of the questions to predict for.

    Returns:
        Array of questions x actions.
    """
    from knowgate.training.classifiers import fit_platt_scaling  # imports scikit-learn, which takes seconds

    predictions = []
    for right in training.right.T:
        scaling = fit_platt_scaling(1 - training.needs, right)
        # There is nothing to fit if all answers, or none, are correct.
        is_constant = scaling["kind"] == "none"
        predictions.append(np.full(len(needs), right.mean()) if is_constant else apply_calibration(1 - needs, scaling))
    return np.stack(predictions, axis=1)


def choose_actions(probabilities: FloatArray, searches: Sequence[float], price: float) -> NDArray[np.int64]:
    """Return the index of the best action for each question; ties go to the action with fewer searches."""
    best: NDArray[np.int64] = np.argmax(probabilities - price * np.asarray(searches), axis=1)
    return best


def measure_actions(
    gate: str, training: ActionOutcomes, test: ActionOutcomes, prices: Sequence[float], bootstrap: Bootstrap
) -> list[ActionResult]:
    """Fit success probabilities on `training` and measure the chosen actions on `test`, at each price."""
    probabilities = predict_action_success(training, test.needs)
    return [
        _measure_choice(gate, test, choose_actions(probabilities, test.searches, price), price, bootstrap)
        for price in prices
    ]


def _measure_choice(
    gate: str, outcomes: ActionOutcomes, actions: NDArray[np.int64], price: float, bootstrap: Bootstrap
) -> ActionResult:
    right = outcomes.right[np.arange(len(actions)), actions]
    means = estimate_column_means(
        bootstrap, {"accuracy": right, "against_always": right.astype(float) - outcomes.open_right}
    )
    p_value, _, _ = mcnemar_test(right, outcomes.open_right)
    return ActionResult(
        gate=gate,
        price=price,
        shares=tuple(float((actions == index).mean()) for index in range(len(ACTIONS))),
        searches=float(np.asarray(outcomes.searches)[actions].mean()),
        p_mcnemar=p_value,
        **means,
    )


def evaluate_actions(
    table: LabelTable, gates: Sequence[TableScores], once_right: BoolArray, price: float, bootstrap: Bootstrap
) -> list[ActionResult]:
    """Measure every gate with the choice between skipping, one retrieval and several rounds.

    Args:
        table: Rows with answers after several rounds of retrieval.
        gates: Scored gates.
        once_right: Whether the answer after one retrieval is correct.
        price: Price of a search, in correct answers.
        bootstrap: Resamples of all rows; the same number and seed are used for the test rows.
    """
    several_right = table.iterative_right
    if several_right is None:
        raise BadSetting(
            "price_retrieval compares skipping, one retrieval and several rounds, but no row has an answer after "
            "several rounds. Label with iterative=True, or import such answers with `knowgate import-answers`."
        )
    dev = table.is_dev
    if not dev.any() or dev.all():
        raise BadSetting(
            f"{len(table.rows)} questions are too few to fit expected gains on some and test them on others. "
            "Label more."
        )
    right = np.stack([table.closed_right, once_right, several_right], axis=1)
    test_bootstrap = Bootstrap(int((~dev).sum()), bootstrap.resamples, bootstrap.seed)
    results = []
    for gate in gates:
        outcomes = ActionOutcomes(gate.needs, right, table.always_right, (0.0, 1.0, table.mean_rounds))
        results += measure_actions(gate.name, outcomes.select(dev), outcomes.select(~dev), [price], test_bootstrap)
    return results


def build_action_table(results: Sequence[ActionResult]) -> TextTable:
    """Build the table of the three actions, one row per gate and price."""
    columns = (
        "gate", "price of a search", "skip", "one retrieval", "several", "searches", "accuracy, three actions",
        "against always once", "p",
    )  # fmt: skip
    rows = [
        (
            result.gate,
            f"{result.price:g}",
            *map(format_percent, result.shares),
            f"{result.searches:.2f}",
            format_percent_estimate(result.accuracy),
            format_points_estimate(result.against_always),
            format_p_value(result.p_mcnemar),
        )
        for result in results
    ]
    return TextTable("Skip, retrieve once, or several times", columns, tuple(rows))
