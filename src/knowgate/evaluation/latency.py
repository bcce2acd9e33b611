"""How long a decision takes when questions come one at a time: what a user waits for, where batches would hide it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.display import Sheet
from knowgate.errors import BadInput
from knowgate.gates import bind_gate, gate_name, load_gate, read_questions, score_questions
from knowgate.prompts import AnswerPrompts
from knowgate.types import Gate, Model, Question

WARM = 2  # questions asked before the clock counts: the first ones load weights and indexes


@dataclass(frozen=True)
class Latency:
    """Seconds of deciding, in the order of the questions."""

    gate: str
    seconds: tuple[float, ...]

    def at(self, share: float) -> float:
        return float(np.quantile(self.seconds, share))


def time_gates(
    gates: Sequence[str], questions: Sequence[Question], model: Model, prompts: AnswerPrompts, *, plug_in: bool = False
) -> list[Latency]:
    """Every gate on every question, in turns, so that whatever slows the machine down slows all of them."""
    if len(questions) <= WARM:
        raise BadInput(f"timing needs more than {WARM} questions, as the first ones are not counted.")
    bound = [bind_gate(load_gate(gate, plug_in=plug_in), model, prompts) for gate in gates]
    taken = [[_decide(gate, question, model, prompts) for gate in bound] for question in questions][WARM:]
    return [
        Latency(gate_name(gate), tuple(seconds)) for gate, seconds in zip(gates, zip(*taken, strict=True), strict=True)
    ]


def _decide(gate: Gate, question: Question, model: Model, prompts: AnswerPrompts) -> float:
    start = time.perf_counter()
    score_questions(gate, [question], read_questions(model, [gate], [question], prompts))
    return time.perf_counter() - start


def latency_sheet(found: Sequence[Latency]) -> Sheet:
    rows = [
        (one.gate, f"{one.at(0.5):.4f}", f"{one.at(0.95):.4f}", f"{np.mean(one.seconds):.4f}", str(len(one.seconds)))
        for one in found
    ]
    columns = ("gate", "median", "95 % within", "mean", "questions")
    return Sheet(f"Seconds to decide, one question at a time (the first {WARM} are not counted)", columns, tuple(rows))
