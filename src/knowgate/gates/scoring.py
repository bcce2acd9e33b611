"""What a gate says, checked: as many numbers as questions, each of them usable. Others may say anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from knowgate.errors import ModelError
from knowgate.gates.outside import blamed
from knowgate.types import Gate, Question, Reading, Scored


def score_questions(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
    """The gate's needs, checked: one per question, each a number in [0, 1]."""
    return score_both(gate, questions, readings).needs


def score_both(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> Scored:
    """Checked needs, with the raw scores of a fitted gate beside them."""
    with blamed(gate):
        scored = gate.score_both(questions, readings)
    try:
        needs = [float(need) for need in scored.needs]
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"gate '{gate.name}' gave no list of numbers ({error}): `score` gives a need each.") from error
    check_count(gate, "needs", needs, questions)
    for question, need in zip(questions, needs, strict=True):
        if not (math.isfinite(need) and 0 <= need <= 1):
            raise ModelError(f"gate '{gate.name}' gave {need} for '{question.text[:60]}': not a number in [0, 1].")
    if scored.raw is not None:
        check_count(gate, "raw scores", scored.raw, questions)
    return Scored(needs, scored.raw)


def measure_distances(gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
    """How far the questions lie from those of the gate's fit, checked: one each, a number from 0 on or nothing."""
    with blamed(gate):
        found = gate.distances(questions, readings)
    check_count(gate, "distances", found, questions)
    for question, distance in zip(questions, found, strict=True):
        if distance is not None and not (isinstance(distance, (int, float)) and 0 <= distance < math.inf):
            raise ModelError(f"gate '{gate.name}' gave the distance {distance} for '{question.text[:60]}': no number.")
    return found


def check_count(gate: Gate, what: str, given: Sequence[object], questions: Sequence[Question]) -> None:
    """A gate of another package may give too few or too many; nobody would know whose is whose."""
    if len(given) != len(questions):
        raise ModelError(f"gate '{gate.name}' gave {len(given)} {what} for {len(questions)} questions; one each.")
