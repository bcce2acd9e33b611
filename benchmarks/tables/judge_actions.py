"""Table of the choice between skipping, one retrieval and several, fitted on dev rows."""

from __future__ import annotations

import numpy as np

from benchmarks.judge_answers import Judge, SplitPredictions
from benchmarks.judge_cascade import RESAMPLES, compute_needs
from benchmarks.tables.common import Rows
from knowgate.evaluation.retrieval_actions import (
    ActionOutcomes,
    choose_actions,
    measure_actions,
    predict_action_success,
)
from knowgate.stats.bootstrap import Bootstrap, Estimate

SEARCH_PRICES = (0.0, 0.01, 0.02, 0.05, 0.1)  # prices of a search, in correct answers


def action_rows(judge: Judge) -> Rows:
    """Return one row per price of a search."""
    draws = Bootstrap(len(judge.test.answers), RESAMPLES)
    test = _collect_outcomes(judge.test)
    probabilities = predict_action_success(_collect_outcomes(judge.dev), test.needs)
    lines = []
    for price in SEARCH_PRICES:
        actions = choose_actions(probabilities, test.searches, price)
        lines.append(measure_actions(judge.name, test, actions, price, draws))
    return [
        (f"{100 * line.price:g}", *(f"{share:.0%}" for share in line.shares), f"{line.searches:.2f}",
         _points(line.accuracy), _points(line.against_always, signed=True),
         "< .001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}")
        for line in lines
    ]  # fmt: skip


def _collect_outcomes(part: SplitPredictions) -> ActionOutcomes:
    answers = part.answers
    right = np.stack([answers.closed, part.arbiter_right, answers.several], axis=1)
    return ActionOutcomes(compute_needs(part, "known"), right, answers.open)


def _points(value: Estimate, *, signed: bool = False) -> str:
    form = "+.1f" if signed else ".1f"
    parts = [format(100 * (number or 0.0), form) for number in (value.value, value.low, value.high)]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"
