"""One reading per question, shared by all gates: their wants are joined into one pass.

Knows models and gates by their protocols only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from knowgate.prompts.answer import AnswerPrompts
from knowgate.types import AskingGate, Gate, Model, Question, Reading, Vector, Want


def read_questions(
    model: Model, gates: Sequence[Gate], questions: Sequence[Question], prompts: AnswerPrompts
) -> list[Reading]:
    """What the gates need, from one pass over the bare questions and each asking gate's own prompt."""
    want = functools.reduce(operator.or_, (gate.want for gate in gates), Want())
    readings = [Reading() for _ in questions]
    if questions and not want.is_nothing:
        readings = model.read([prompts.closed(question) for question in questions], want)
    for gate in gates:
        if isinstance(gate, AskingGate) and questions:
            logits = model.label_logits(gate.ask(questions), gate.labels)
            readings = [_with_labels(reading, gate.name, rows) for reading, rows in zip(readings, logits, strict=True)]
    return readings


def _with_labels(reading: Reading, name: str, rows: Vector) -> Reading:
    return replace(reading, labels={**reading.labels, name: rows})
