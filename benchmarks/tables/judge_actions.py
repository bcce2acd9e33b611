"""Skip, one retrieval or several, from predictions: the library's own choice, fitted on dev rows."""

from __future__ import annotations

import numpy as np

from benchmarks.judge_answers import Judge, Predicted
from benchmarks.judge_cascade import RESAMPLES, needs_of
from benchmarks.tables.common import Rows
from knowgate.evaluation.actions import PRICES, ActionRows, action_lines
from knowgate.statistics import Draws, Estimate


def action_rows(judge: Judge) -> Rows:
    draws = Draws(len(judge.test.answers), RESAMPLES)
    lines = action_lines(judge.name, _rows(judge.dev), _rows(judge.test), PRICES, draws)
    return [
        (f"{100 * line.price:g}", *(f"{share:.0%}" for share in line.shares), f"{line.searches:.2f}",
         _points(line.accuracy), _points(line.against_always, signed=True),
         "< .001" if line.p_mcnemar < 0.001 else f"{line.p_mcnemar:.3f}")
        for line in lines
    ]  # fmt: skip


def _rows(part: Predicted) -> ActionRows:
    answers = part.answers
    right = np.stack([answers.closed, part.given, answers.several], axis=1)
    return ActionRows(needs_of(part, "known"), right, answers.open)


def _points(value: Estimate, *, signed: bool = False) -> str:
    form = "+.1f" if signed else ".1f"
    parts = [format(100 * (each or 0.0), form) for each in (value.value, value.low, value.high)]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"
