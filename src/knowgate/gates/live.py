"""One reading per question, shared by all gates: their wants are joined into one pass.

Knows models and gates by their protocols only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from knowgate.errors import BadSetting
from knowgate.prompts import AnswerPrompts
from knowgate.types import (
    AskingGate,
    BindingGate,
    Gate,
    Model,
    Neighbour,
    Question,
    Reading,
    RecallingGate,
    Signal,
    Vector,
    Want,
)


def read_questions(
    model: Model, gates: Sequence[Gate], questions: Sequence[Question], prompts: AnswerPrompts
) -> list[Reading]:
    """What the gates need, from one pass over the bare questions and each asking gate's own prompt."""
    want = functools.reduce(operator.or_, (gate.want for gate in gates), Want())
    _check_one_layer(gates)
    readings = [Reading() for _ in questions]
    if questions and not want.is_nothing:
        readings = model.read([prompts.closed(question) for question in questions], want)
    for gate in gates:
        if isinstance(gate, RecallingGate) and questions:
            recalled = gate.recall(questions)
            readings = [_with_neighbours(*pair, gate.name) for pair in zip(readings, recalled, strict=True)]
        if isinstance(gate, AskingGate) and Signal.LABELS in gate.needs and questions:
            logits = model.label_logits(gate.ask(questions, readings), gate.labels)
            readings = [_with_labels(reading, gate.name, rows) for reading, rows in zip(readings, logits, strict=True)]
    return readings


def _check_one_layer(gates: Sequence[Gate]) -> None:
    """A pass gives the end states of its samples at one layer."""
    asked = [gate for gate in gates if gate.want.sample_layer is not None]
    if len({gate.want.sample_layer for gate in asked}) > 1:
        listed = ", ".join(f"{gate.name}: {gate.want.sample_layer}" for gate in asked)
        raise BadSetting(f"gates in one pass must read their samples at the same layer, not at several ({listed}).")


def bind(gate: Gate, model: Model, prompts: AnswerPrompts) -> Gate:
    """The gate made sure of its model and wording, where it has any."""
    return gate.bind(model, prompts.fingerprint) if isinstance(gate, BindingGate) else gate


def _with_neighbours(reading: Reading, neighbours: tuple[Neighbour, ...], name: str) -> Reading:
    return replace(reading, neighbours={**reading.neighbours, name: neighbours})


def _with_labels(reading: Reading, name: str, rows: Vector) -> Reading:
    return replace(reading, labels={**reading.labels, name: rows})
