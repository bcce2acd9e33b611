"""Cases that were read get their decision: by the gate's need against a threshold, then by rules, which come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from knowgate.data.signals.confidence import has_distinct_logits
from knowgate.errors import NotOffered
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import choose_answers
from knowgate.gates.calibration.deployment import has_guarantee_without_arbiter
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.scoring import check_count, measure_distances, score_with_raw, wrap_plugin_errors
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.question_state import QuestionState, is_complete_draft, measure_time
from knowgate.retrieval.passages import MAX_ROUNDS
from knowgate.types import AnswerPair, Arbiter, Decision, DecisionNote, Gate, Model, TextEvent

MIN_DIGITS, MAX_DIGITS = 2, 9  # digits of a need and its threshold in words


def apply_gate(gate: Gate, threshold: float, cases: Sequence[QuestionState]) -> None:
    """Retrieve above the threshold; what the gate says of it is the reason."""
    questions, readings = [case.question for case in cases], [case.reading for case in cases]
    scored = score_with_raw(gate, questions, readings)
    with wrap_plugin_errors(gate):
        reasons = gate.explain(questions, readings)
        steps = gate.steps(questions, readings)
    check_count(gate, "explanations", reasons, questions)
    check_count(gate, "numbers of rounds", steps, questions)
    distances = measure_distances(gate, questions, readings)
    raws: Sequence[float | None] = scored.raw or [None] * len(cases)
    told = zip(cases, scored.needs, raws, reasons, steps, distances, strict=True)
    for case, need, raw, why, rounds, distance in told:
        case.steps = min(rounds, MAX_ROUNDS)
        if gate.name in case.reading.labels and not has_distinct_logits(case.reading.labels[gate.name]):
            case.notes.append(DecisionNote.LABELS_UNLISTED)
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


def apply_overrides(cases: Sequence[QuestionState], rules: RuleSet | None, shadow: str) -> None:
    """What stands above a gate's decisions: rules, and that everything is looked up for the reason `shadow`, if any."""
    if rules is not None:
        apply_rules(rules, cases)
    if shadow:
        force_retrieval(shadow, cases)


def apply_rules(rules: RuleSet, cases: Sequence[QuestionState]) -> None:
    """Decide the cases that a rule fits; the need stays what the gate found."""
    for case in cases:
        ruling = rules.judge(case.question.text)
        if ruling is not None and case.decision is not None:
            reason = f"{ruling.reason} (rule '{ruling.rule}')"
            case.decision = replace(case.decision, retrieve=ruling.retrieve, reason=reason, rule=ruling.rule)


def force_retrieval(why: str, cases: Sequence[QuestionState]) -> None:
    """Retrieve for all; what the gate wanted is noted where it wanted something else."""
    for case in cases:
        if case.decision is not None and not case.decision.retrieve:
            case.decision = replace(case.decision, retrieve=True, reason=f"{why}: {case.decision.reason}")
            case.notes.append(DecisionNote.WOULD_SKIP)


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
    apart = (digits for digits in range(MIN_DIGITS, MAX_DIGITS) if f"{need:.{digits}f}" != f"{threshold:.{digits}f}")
    return next(apart, MIN_DIGITS if need == threshold else MAX_DIGITS)


def bind_arbiter(arbiter: Arbiter | None, gate: Gate, model: Model, prompts: AnswerPrompts) -> Arbiter | None:
    """The arbiter, found to work with this model.

    The rules that are on by default stay out where something is proven about the gate without them.
    """
    if arbiter is None or (arbiter is RULES_ARBITER and has_guarantee_without_arbiter(gate)):
        return None
    missing = arbiter.needs - model.offers
    if missing:
        raise NotOffered(
            f"the arbiter '{arbiter.name}' needs {', '.join(sorted(missing))}, which {model.name} does not give. Fit "
            "one on label runs of this LLM, or use --arbiter rules."
        )
    return arbiter.bind(model, prompts.fingerprint)


def mark_replaceable_answers(arbiter: Arbiter | None, cases: Sequence[QuestionState], max_tokens: int) -> None:
    """Mark the cases whose answer with passages may be replaced by their draft."""
    if arbiter is None:
        return
    for case in cases:
        if case.reading.draft is not None and is_complete_draft(case.reading.draft, max_tokens):
            case.lets_out = arbiter.accepts_beginning


def arbitrate(arbiter: Arbiter | None, cases: Sequence[QuestionState]) -> Iterator[TextEvent]:
    """Give each held case its answer, and say what was held back."""
    held = [case for case in cases if case.lets_out is not None]
    if arbiter is None or not held:
        return
    with measure_time(held, "arbiter"):
        choices = choose_answers(arbiter, [_both(case) for case in held])
    for case, choice in zip(held, choices, strict=True):
        case.choice = choice
        if choice.from_memory:
            case.text = choice.closed
            case.notes.append(DecisionNote.DRAFT_GIVEN)
        if case.text and not case.was_let_out:
            yield TextEvent(case.text)


def _both(case: QuestionState) -> AnswerPair:
    draft, opened = case.reading.draft, case.done
    if draft is None or opened is None:
        raise RuntimeError("a case is weighed before it has two answers")
    return AnswerPair(case.question, draft, opened, case.passages)
