"""Choice between no search, one search and several searches, by expected gain.

For each action, the probability of a correct answer is predicted from the gate's need. The prediction is fitted on the
dev rows (Platt scaling), and the choice is tested on the other rows. The expected gain of an action is this probability
minus the price of its searches. Prices are in correct answers: 0.05 means that 20 searches cost as much as one correct
answer is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import TextTable, format_percent
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import DEFAULT_ROUNDS, LabelTable
from knowgate.errors import BadSetting
from knowgate.evaluation.gate_results import estimate_column_means
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.stats.bootstrap import Bootstrap, Estimate
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import format_p_value, format_percent_estimate, format_points_estimate, mcnemar_test

ACTIONS = ("skip", "one", "several")  # numbers of searches


@dataclass(frozen=True)
class ActionResult:
    """Results of choosing among three actions, at one search price.

    Actions: skip, retrieve once, retrieve several times.

    Attributes:
        gate: Name of the gate.
        price: Price of a search, as a share of what a correct answer is worth. At 0.05, twenty searches cost as much as
            one correct answer is worth.
        shares: Share of the questions that get each action, in the order of `ACTIONS`.
        searches: Mean number of searches per question.
        accuracy: Accuracy of the final answers.
        against_always: Accuracy minus the accuracy of one retrieval for every question.
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
    """Whether each action answers each question correctly. Actions: skip, retrieve once, retrieve several times.

    Attributes:
        needs: Need for retrieval of each question (0 = the LLM knows, 1 = retrieve).
        right: Whether the answer after each action is correct; one row per question, one column per action.
        open_book_right: Whether the answer with the passages of one retrieval is correct. (In `right`, an arbiter may have
            chosen the answer without passages instead.)
        searches: Mean number of searches of each action.
    """

    needs: FloatArray
    right: BoolArray
    open_book_right: BoolArray
    searches: tuple[float, ...] = (0.0, 1.0, DEFAULT_ROUNDS)

    def select(self, rows: BoolArray) -> ActionOutcomes:
        """Return the outcomes of the questions in a mask."""
        return ActionOutcomes(self.needs[rows], self.right[rows], self.open_book_right[rows], self.searches)


def predict_action_success(training: ActionOutcomes, needs: FloatArray) -> FloatArray:
    """Predict each action's probability of a correct answer, from the need alone.

    Actions: skip, retrieve once, retrieve several times.

    Args:
        training: Outcomes that the probabilities are fitted on.
        needs: Needs of the questions to predict for (0 = the LLM knows, 1 = retrieve).

    Returns:
        Probabilities; one row per question, one column per action.
    """
    from knowgate.training.classifiers import fit_platt_scaling

    predictions = []
    for right in training.right.T:  # the outcomes of one action after the other
        scaling = fit_platt_scaling(1 - training.needs, right)
        if scaling["kind"] == "none":  # nothing can be fitted, because all answers are correct, or none
            predictions.append(np.full(len(needs), right.mean()))
        else:
            predictions.append(apply_calibration(1 - needs, scaling))
    return np.stack(predictions, axis=1)


def choose_actions(probabilities: FloatArray, searches: Sequence[float], price: float) -> NDArray[np.int64]:
    """Return the best action for each question, as its index in `ACTIONS`.

    Searches cost `price`, and a correct answer counts 1.

    Args:
        probabilities: Probability that each action answers correctly (questions x actions).
        searches: Mean number of searches of each action.
        price: Price of a search, in correct answers: at 0.05, twenty searches cost as much as one correct answer is
            worth.
    """
    # argmax returns the first maximum, and actions are in ascending order of searches.
    return np.asarray(np.argmax(probabilities - price * np.asarray(searches), axis=1))


def measure_actions(
    gate: str, outcomes: ActionOutcomes, actions: NDArray[np.int64], price: float, bootstrap: Bootstrap
) -> ActionResult:
    """Measure accuracy and searches of the actions that a gate chose.

    Args:
        gate: Name of the gate.
        outcomes: Outcomes of the questions.
        actions: The action chosen for each question, as its index in `ACTIONS`.
        price: Price of a search, in correct answers.
        bootstrap: Resamples for the intervals.
    """
    right = outcomes.right[np.arange(len(actions)), actions]  # whether the chosen action answers each question right
    changes = right.astype(float) - outcomes.open_book_right
    p_value, _, _ = mcnemar_test(right, outcomes.open_book_right)
    n_searches = np.asarray(outcomes.searches)[actions]
    return ActionResult(
        gate=gate,
        price=price,
        shares=tuple(float((actions == index).mean()) for index in range(len(ACTIONS))),
        searches=float(n_searches.mean()),
        p_mcnemar=p_value,
        **estimate_column_means(bootstrap, {"accuracy": right, "against_always": changes}),
    )


def evaluate_actions(
    table: LabelTable, gates: Sequence[TableScores], once_right: BoolArray, search_price: float, bootstrap: Bootstrap
) -> list[ActionResult]:
    """Evaluate gates that choose one of three actions: skip, retrieve once, or retrieve several times.

    Args:
        table: Rows with answers after several searches.
        gates: For each gate, the need for retrieval (0 to 1) that it gives to each question.
        once_right: For each question, whether the answer after one search is correct.
        search_price: Price of a search, in correct answers: the price in money, divided by that of a wrong answer.
        bootstrap: Bootstrap whose number of resamples and seed to use.

    Raises:
        BadSetting: No row has an answer after several searches, or there are too few rows to fit and test.
    """
    if table.iterative_right is None:
        raise BadSetting(
            "`price_wrong` needs answers after several searches, but no question has one. Leave `price_wrong` out, or label "
            "the questions again with iterative=True."
        )
    dev = table.is_dev  # the rows to learn from; the others are for the test
    if not dev.any() or dev.all():
        raise BadSetting(
            f"{len(table.rows)} questions are too few to compare answers without a search, after one search and after "
            "several searches. Label more questions with `knowgate label`."
        )
    right = np.stack([table.closed_book_right, once_right, table.iterative_right], axis=1)
    test_bootstrap = Bootstrap(int((~dev).sum()), bootstrap.resamples, bootstrap.seed)
    results = []
    for gate in gates:
        outcomes = ActionOutcomes(gate.needs, right, table.retrieved_right, (0.0, 1.0, table.mean_rounds))
        training, test = outcomes.select(dev), outcomes.select(~dev)
        actions = choose_actions(predict_action_success(training, test.needs), test.searches, search_price)
        results.append(measure_actions(gate.gate, test, actions, search_price, test_bootstrap))
    return results


def build_action_table(results: Sequence[ActionResult]) -> TextTable:
    """Build the table of the three actions, one row per gate and price."""
    columns: dict[str, Callable[[ActionResult], str]] = {
        "gate": lambda result: result.gate,
        "price of a search": lambda result: f"{result.price:g}",
        "skip": lambda result: format_percent(result.shares[0]),
        "one retrieval": lambda result: format_percent(result.shares[1]),
        "several": lambda result: format_percent(result.shares[2]),
        "searches": lambda result: f"{result.searches:.2f}",
        "accuracy, three actions": lambda result: format_percent_estimate(result.accuracy),
        "against always once": lambda result: format_points_estimate(result.against_always),
        "p": lambda result: format_p_value(result.p_mcnemar),
    }
    return TextTable.build("Skip, retrieve once, or several times", results, columns)
