"""Cases that were read get their decision: by the gate's need against a threshold, then by rules, which come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from knowgate.gates import blamed, check_count, measure_distances, score_both
from knowgate.pipeline.case import Case
from knowgate.retrieval import MOST_ROUNDS
from knowgate.rules import RuleBook
from knowgate.signals import tells_apart
from knowgate.types import Decision, Gate, Note

FEWEST, MOST = 2, 9  # digits of a need and its threshold in words


def decide_by(gate: Gate, threshold: float, cases: Sequence[Case]) -> None:
    """Retrieve above the threshold; what the gate says of it is the reason."""
    questions, readings = [case.question for case in cases], [case.reading for case in cases]
    scored = score_both(gate, questions, readings)
    with blamed(gate):
        reasons = gate.explain(questions, readings)
        steps = gate.steps(questions, readings)
    check_count(gate, "explanations", reasons, questions)
    check_count(gate, "numbers of rounds", steps, questions)
    distances = measure_distances(gate, questions, readings)
    raws: Sequence[float | None] = scored.raw or [None] * len(cases)
    told = zip(cases, scored.needs, raws, reasons, steps, distances, strict=True)
    for case, need, raw, why, rounds, distance in told:
        case.steps = min(rounds, MOST_ROUNDS)
        if gate.name in case.reading.labels and not tells_apart(case.reading.labels[gate.name]):
            case.notes.append(Note.LABELS_UNLISTED)
        case.decision = Decision(
            need > threshold,
            need,
            threshold,
            gate.name,
            _reason(need, threshold, why, gate.note),
            case.reading.neighbours.get(gate.name, ()),
            raw=raw,
            distance=distance,
        )


def settle(cases: Sequence[Case], rules: RuleBook | None, shadow: str) -> None:
    """What stands above a gate's decisions: rules, and that everything is looked up for the reason `shadow`, if any."""
    if rules is not None:
        overrule(rules, cases)
    if shadow:
        look_up_anyway(shadow, cases)


def overrule(rules: RuleBook, cases: Sequence[Case]) -> None:
    """Decide the cases that a rule fits; the need stays what the gate found."""
    for case in cases:
        ruling = rules.judge(case.question.text)
        if ruling is not None and case.decision is not None:
            reason = f"{ruling.reason} (rule '{ruling.rule}')"
            case.decision = replace(case.decision, retrieve=ruling.retrieve, reason=reason, rule=ruling.rule)


def look_up_anyway(why: str, cases: Sequence[Case]) -> None:
    """Retrieve for all; what the gate wanted is noted where it wanted something else."""
    for case in cases:
        if case.decision is not None and not case.decision.retrieve:
            case.decision = replace(case.decision, retrieve=True, reason=f"{why}: {case.decision.reason}")
            case.notes.append(Note.WOULD_SKIP)


def _reason(need: float, threshold: float, *why: str) -> str:
    digits = _digits(need, threshold)
    relation = "above" if need > threshold else "not above"
    said = (
        f"is {relation} {threshold:.{digits}f}"
        if threshold >= 0
        else "counts for nothing: the gate was set to always retrieve"
    )
    because = "; ".join(part for part in why if part)
    return f"need {need:.{digits}f} {said}" + (f": {because}" if because else "")


def _digits(need: float, threshold: float) -> int:
    """As many as tell the two apart; two where they are the same."""
    apart = (digits for digits in range(FEWEST, MOST) if f"{need:.{digits}f}" != f"{threshold:.{digits}f}")
    return next(apart, FEWEST if need == threshold else MOST)
