"""Decide for each question whether to retrieve; after retrieval, choose between two answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from knowgate.data.signals.confidence import has_distinct_logits
from knowgate.errors import UnsupportedSignal
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import choose_answers
from knowgate.gates.baselines import AlwaysGate, ConstantGate, NeverGate
from knowgate.gates.calibration.deployment import has_guarantee_without_arbiter
from knowgate.gates.rules.arithmetic import ARITHMETIC_RULE, compute_arithmetic
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.scoring import check_count, measure_distances, score_with_raw, wrap_plugin_errors
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.question_state import QuestionState, is_complete_draft, measure_time
from knowgate.retrieval.passages import MAX_ROUNDS
from knowgate.types import AnswerPair, Arbiter, Decision, DecisionNote, Gate, Model, TextEvent

MIN_DIGITS, MAX_DIGITS = 2, 9  # decimals of need and threshold in a reason


# --- before retrieval -----------------------------------------------------------------------------


def apply_gate(gate: Gate, threshold: float, states: Sequence[QuestionState]) -> None:
    """Score questions with the gate and set the decision of each: retrieve if the score is above the threshold.

    The score is the need for retrieval (0: the LLM knows, 1: retrieve). Also sets the maximum number of retrieval
    rounds of each question.
    """
    questions, readings = [state.question for state in states], [state.reading for state in states]
    scores = score_with_raw(gate, questions, readings)
    with wrap_plugin_errors(gate):
        explanations = gate.explain(questions, readings)
        rounds = gate.count_rounds(questions, readings)
    check_count(gate, "explanations", explanations, questions)
    check_count(gate, "numbers of rounds", rounds, questions)
    distances = measure_distances(gate, questions, readings)
    raw_scores: Sequence[float | None] = scores.raw or [None] * len(states)
    rows = zip(states, scores.needs, raw_scores, explanations, rounds, distances, strict=True)
    for state, need, raw, explanation, max_rounds, distance in rows:
        state.max_rounds = min(max_rounds, MAX_ROUNDS)
        if gate.name in state.reading.labels and not has_distinct_logits(state.reading.labels[gate.name]):
            state.notes.append(DecisionNote.LABELS_UNLISTED)
        state.decision = Decision(
            need > threshold,
            need,
            threshold,
            gate.name,
            _explain_decision(gate, need, threshold, explanation),
            state.reading.neighbors.get(gate.name, ()),
            raw=raw,
            distance=distance,
        )


def _explain_decision(gate: Gate, need: float, threshold: float, explanation: str) -> str:
    """Explain a decision in words: what it means, the need with its threshold in percent, and what the gate adds.

    Gates that do the same for every question have no need worth showing.
    """
    details = "; ".join(filter(None, [explanation, gate.note]))
    if not (summary := describe_constant(gate, threshold)):
        digits = _count_digits(need, threshold) - 2
        verdict = "the LLM may not know" if need > threshold else "the LLM probably knows"
        summary = f"{verdict} (need {100 * need:.{digits}f} %, threshold {100 * threshold:.{digits}f} %)"
    return f"{summary}: {details}" if details else summary


def describe_constant(gate: Gate, threshold: float) -> str:
    """Say what a gate does that decides the same for every question; '' for every other gate."""
    if isinstance(gate, AlwaysGate | NeverGate):
        verb = "retrieves" if isinstance(gate, AlwaysGate) else "skips retrieval"
        return f"the gate '{gate.name}' {verb} for every question"
    if threshold < 0:
        return "this gate is set to retrieve for every question"
    if isinstance(gate, ConstantGate):
        return "this policy skips retrieval for every question"
    return ""


def _count_digits(need: float, threshold: float) -> int:
    """Return how many decimals of the fractions are needed to show that the need and the threshold differ."""
    if need == threshold:
        return MIN_DIGITS
    for digits in range(MIN_DIGITS, MAX_DIGITS):
        if f"{need:.{digits}f}" != f"{threshold:.{digits}f}":
            return digits
    return MAX_DIGITS


def apply_rules(rules: RuleSet, states: Sequence[QuestionState]) -> None:
    """Let rules override the gate for questions that they match. The gate's score stays in the decision."""
    for state in states:
        match = rules.decide(state.question.text)
        if match is not None and state.decision is not None:
            reason = f"{match.reason} (rule '{match.rule}')"
            state.decision = replace(state.decision, retrieve=match.retrieve, reason=reason, rule=match.rule)


def compute_answers(states: Sequence[QuestionState]) -> Iterator[TextEvent]:
    """Answer questions that the rule `arithmetic` matched by computing them, and yield the answers."""
    for state in states:
        if state.decision is not None and state.decision.rule == ARITHMETIC_RULE:
            result = compute_arithmetic(state.question.text)
            if result is not None:
                state.text, state.is_computed = result, True
                yield TextEvent(result)


def force_retrieval(reason: str, states: Sequence[QuestionState]) -> None:
    """Retrieve for every question, and note on the decision where the gate would have skipped (shadow mode)."""
    for state in states:
        if state.decision is not None and not state.decision.retrieve:
            state.decision = replace(state.decision, retrieve=True, reason=f"{reason}: {state.decision.reason}")
            state.notes.append(DecisionNote.WOULD_SKIP)


# --- after retrieval ------------------------------------------------------------------------------


def bind_arbiter(arbiter: Arbiter | None, gate: Gate, model: Model, prompts: AnswerPrompts) -> Arbiter | None:
    """Check that an arbiter works with this model and return it ready for use.

    The default rules arbiter is left out if the gate has a guarantee that was proven without an arbiter.

    Raises:
        UnsupportedSignal: The arbiter needs signals that the model does not provide.
    """
    if arbiter is None or (arbiter is RULES_ARBITER and has_guarantee_without_arbiter(gate)):
        return None
    missing = arbiter.needs - model.offers
    if missing:
        raise UnsupportedSignal(
            f"the arbiter '{arbiter.name}' needs {', '.join(sorted(missing))}, which {model.name} does not provide. "
            "Fit an arbiter on label runs of this LLM, or use arbiter='rules'."
        )
    return arbiter.bind(model, prompts.fingerprint)


def mark_replaceable_answers(arbiter: Arbiter | None, states: Sequence[QuestionState], max_tokens: int) -> None:
    """Mark questions whose open-book answer the arbiter may still replace by the draft (the closed-book answer).

    Text of a marked answer is streamed only once the arbiter cannot replace it any more.
    """
    if arbiter is None:
        return
    for state in states:
        if state.reading.draft is not None and is_complete_draft(state.reading.draft, max_tokens):
            state.may_show = arbiter.accepts_beginning


def arbitrate(arbiter: Arbiter | None, states: Sequence[QuestionState]) -> Iterator[TextEvent]:
    """Let the arbiter choose the answer of each marked question, and yield the texts that were not streamed yet."""
    replaceable = [state for state in states if state.may_show is not None]
    if arbiter is None or not replaceable:
        return
    with measure_time(replaceable, "arbiter"):
        choices = choose_answers(arbiter, [_pair_answers(state) for state in replaceable])
    for state, choice in zip(replaceable, choices, strict=True):
        state.choice = choice
        if choice.is_closed_book:
            state.text = choice.closed
            state.notes.append(DecisionNote.DRAFT_GIVEN)
        if state.text and not state.is_shown:
            yield TextEvent(state.text)


def _pair_answers(state: QuestionState) -> AnswerPair:
    """Return the closed-book and the open-book answer of a question, with its passages."""
    draft, completion = state.reading.draft, state.completion
    if draft is None or completion is None:
        raise RuntimeError("the question does not have two answers yet")
    return AnswerPair(state.question, draft, completion, state.passages)
