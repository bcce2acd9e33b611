"""One reading per question, shared by all gates: their wants are joined into one pass, and what each of them looks
up or asks is put beside it.

Knows a source of readings by what it does: `live` has that of a model, `recorded` that of a run.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from knowgate.errors import BadSetting
from knowgate.gates.outside import blamed
from knowgate.types import Gate, Question, Reading, Signal, Vector, Want


class Source(Protocol):
    """Where readings come from: a model, or what was recorded of one."""

    def bind(self, gate: Gate) -> Gate:
        """The gate, ready for this LLM and wording; raises if it needs what is not to be had here."""
        ...

    def read(self, questions: Sequence[Question], want: Want) -> list[Reading]:
        """The one pass over the bare questions."""
        ...

    def ask(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """The logits of what the gate asks."""
        ...


def gather_readings(source: Source, gates: Sequence[Gate], questions: Sequence[Question]) -> list[Reading]:
    """Everything the gates need to score these questions."""
    _check_one_layer(gates)
    if not questions:
        return []
    readings = source.read(questions, functools.reduce(operator.or_, (gate.want for gate in gates), Want()))
    for gate in gates:
        if type(gate).recall is not Gate.recall:  # most look nothing up, and readings are many
            readings = _with_recalled(gate, questions, readings)
        if _must_ask(gate, readings):
            logits = source.ask(gate, questions, readings)
            readings = [
                replace(reading, labels={**reading.labels, gate.name: rows})
                for reading, rows in zip(readings, logits, strict=True)
            ]
    return readings


def _with_recalled(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Reading]:
    with blamed(gate):
        recalled = gate.recall(questions)
    name = gate.name
    return [
        replace(reading, neighbours={**reading.neighbours, name: near})
        for reading, near in zip(readings, recalled, strict=True)
    ]


def _must_ask(gate: Gate, readings: Sequence[Reading]) -> bool:
    """Not where the answer is on record."""
    if Signal.LABELS not in gate.needs or all(gate.answered_by in reading.signals for reading in readings):
        return False
    if not gate.labels:
        raise BadSetting(f"gate '{gate.name}' needs labels but has none: give its class `labels` and `ask`.")
    return True


def _check_one_layer(gates: Sequence[Gate]) -> None:
    """A pass gives the end states of its samples at one layer and one place."""
    asked = [gate for gate in gates if gate.want.sample_layer is not None]
    if len({(gate.want.sample_layer, gate.want.sample_end) for gate in asked}) > 1:
        listed = ", ".join(f"{gate.name}: {gate.want.sample_layer}{_place(gate.want)}" for gate in asked)
        raise BadSetting(
            f"gates in one pass must read their samples at the same layer and place, not at several ({listed})."
        )


def _place(want: Want) -> str:
    return "" if want.sample_end else ", before the end token"
