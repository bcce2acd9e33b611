"""The verdict of an evaluation in words, with the numbers that a decision maker needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from knowgate.core.display import MISSING_VALUE, format_percent, format_points
from knowgate.evaluation.cost import (
    SAVINGS_QUESTIONS,
    CostAssumptions,
    QuestionCost,
    estimate_always_cost,
    estimate_gated_cost,
    estimate_never_cost,
)
from knowgate.evaluation.gate_comparison import UNKNOWN_AMOUNT, Evaluation
from knowgate.evaluation.recommendation import FOLDS, MIN_QUESTIONS, MIN_SKIPPED, Z_CERTAIN, Recommendation, recommend
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_points_estimate

STRICTER_TEST = (
    "; the interval alone does not decide: a gate that was chosen among several must gain more than "
    f"{Z_CERTAIN:.1f} standard errors"
)
LEVEL_LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}
LOW_KNOWN_SHARE = 0.15  # if the LLM knows fewer questions, there is little to skip
LOW_AUROC = 0.65  # a gate with less hardly tells known from unknown questions
MAX_SUGGESTED_QUESTIONS = 50_000
MAX_LISTED_SLICES = 3


@dataclass(frozen=True)
class KeyFigure:
    """A number that stands out, and what it is."""

    value: str
    description: str


@dataclass(frozen=True)
class EvaluationVerdict:
    """A recommendation in words.

    Attributes:
        headline: What to do.
        sentences: Why, and how certain that is.
        key_figures: The most important numbers.
        always: Cost of always retrieving.
        gated: Cost with the recommended gate.
        never: Cost of never retrieving.
        note: How the recommendation was chosen.
    """

    recommendation: Recommendation
    headline: str
    sentences: list[str]
    key_figures: list[KeyFigure]
    always: QuestionCost
    gated: QuestionCost
    never: QuestionCost
    note: str = ""

    @property
    def label(self) -> str:
        """The level of the recommendation in two or three words."""
        return LEVEL_LABELS[self.recommendation.level]

    @property
    def text(self) -> str:
        """Headline and sentences."""
        return " ".join([self.headline, *self.sentences])


def build_verdict(evaluation: Evaluation, assumptions: CostAssumptions, max_loss: float) -> EvaluationVerdict:
    """Recommend a gate and describe the recommendation.

    Args:
        evaluation: Evaluated gates.
        assumptions: Prices and times for savings.
        max_loss: Share of the answers that skipping searches may cost.
    """
    recommendation = recommend(evaluation, max_loss)
    always, never = estimate_always_cost(evaluation.table), estimate_never_cost(evaluation.table)
    gated = _estimate_recommended_cost(evaluation, recommendation) if recommendation.gate else always
    arbiter = _describe_arbiter(evaluation, recommendation)
    if not recommendation.is_positive:
        sentences = [*_explain_no_gate(recommendation, evaluation), *arbiter]
        if evaluation.has_open_answers:
            sentences.append(_describe_always_cost(always, assumptions))
        headline = _write_negative_headline(recommendation, evaluation)
        return EvaluationVerdict(recommendation, headline, sentences, [], always, gated, never)
    sentences = [
        _describe_skips(recommendation),
        recommendation.guarantee,
        _describe_difference(recommendation),
        *arbiter,
        _describe_losing_slices(recommendation),
        _describe_calls(always, gated),
        _warn_about_distance(recommendation, evaluation),
        _describe_savings(always, gated, assumptions),
    ]
    return EvaluationVerdict(
        recommendation,
        _write_headline(recommendation),
        [sentence for sentence in sentences if sentence],
        _list_key_figures(recommendation, always, gated, assumptions),
        always,
        gated,
        never,
        note="" if recommendation.guarantee else _describe_choice(recommendation, evaluation),
    )


def _estimate_recommended_cost(evaluation: Evaluation, recommendation: Recommendation) -> QuestionCost:
    gate = None if recommendation.is_without_retrieval else evaluation.gate(str(recommendation.gate))
    return estimate_gated_cost(evaluation.table, recommendation.skips, gate, has_arbiter=bool(recommendation.arbiter))


def _describe_arbiter(evaluation: Evaluation, recommendation: Recommendation) -> list[str]:
    """Describe what the arbiter adds where the recommendation does not include it: after every search."""
    cascade = evaluation.cascade
    if (
        cascade is None
        or recommendation.is_without_retrieval
        or (recommendation.is_positive and recommendation.arbiter)
    ):
        return []
    always = next(result for result in cascade.lines if result.gate == "always")
    change = f"{format_points(always.against_always.value or 0.0)} points against always retrieving"
    return [f"The arbiter '{cascade.arbiter}' after every search: {change}{format_interval(always.against_always)}."]


def _describe_losing_slices(recommendation: Recommendation) -> str:
    """Name the large slices on which answers are certainly lost; empty if there are none."""
    slices = recommendation.losing_slices[:MAX_LISTED_SLICES]
    parts = [f"{part.name} {format_points_estimate(part.change)} (n = {part.n:,})" for part in slices]
    return f"It loses answers on: {'; '.join(parts)}." if parts else ""


def _describe_calls(always: QuestionCost, gated: QuestionCost) -> str:
    """State the searches, LLM calls and deciding time per question."""
    return (
        f"Per question it makes {gated.searches:.2f} searches and {gated.llm_calls:.2f} LLM calls (always retrieving: "
        f"{always.searches:.2f} and {always.llm_calls:.2f}); deciding takes {_format_decision_time(gated)}."
    )


def _format_decision_time(cost: QuestionCost) -> str:
    seconds = cost.decision_seconds
    return "an unknown time" if seconds is None else f"{1_000 * seconds:.1f} ms"


def _warn_about_distance(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Warn if many questions are unlike those the recommended gate was fitted on."""
    if recommendation.is_without_retrieval:
        return ""
    gate = evaluation.gate(str(recommendation.gate))
    return format_far_warning(gate.gate, gate.far_share, recommendation.n)


# --- a positive verdict ---------------------------------------------------------------------------


def _write_headline(recommendation: Recommendation) -> str:
    is_certain = recommendation.level == "use"
    if recommendation.is_without_retrieval:
        advice = "Do without retrieval here." if is_certain else "Retrieval hardly pays here: try without."
        return f"{advice} No gate is needed for that."
    arbiter = f" with the arbiter '{recommendation.arbiter}'" if recommendation.arbiter else ""
    threshold = format_threshold(recommendation.threshold)
    return f"{'Use' if is_certain else 'Try'} '{recommendation.gate}' at {threshold}{arbiter}."


def _describe_skips(recommendation: Recommendation) -> str:
    if recommendation.is_without_retrieval:
        return "It saves every search."
    return f"It skips {format_percent(recommendation.skipped.value)} of the searches."


def _describe_choice(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Describe how gate and threshold were chosen, and which guarantees are stored."""
    if not recommendation.agreeing_folds:
        return f"Nothing had to be chosen for that, so all questions measure it. {_list_guarantees(evaluation)}."
    guarantees = _list_guarantees(evaluation, ": knowgate calibrate gives one")
    return (
        f"Gate and threshold were chosen here to lose no more than {format_point_count(recommendation.max_loss)}; "
        f"{recommendation.agreeing_folds} of {FOLDS} repeats without a fifth of the questions chose the same gate. "
        f"{guarantees}."
    )


def _list_guarantees(evaluation: Evaluation, advice: str = "") -> str:
    """List the stored guarantees of the evaluated gates; none of them applies to the recommendation."""
    if not evaluation.guarantees:
        has_stored_needs = any(gate.gate in evaluation.table.recorded_needs for gate in evaluation.gates)
        reason = " (needs on record keep none, folders of gates do)" if has_stored_needs else ""
        return f"No guarantee is stored{reason}{advice}"
    texts = [f"with '{gate}': {guarantee.text}" for gate, guarantee in evaluation.guarantees.items()]
    return f"No guarantee is stored for that; one is {' One is '.join(texts)}".rstrip(".")


def _describe_difference(recommendation: Recommendation) -> str:
    if recommendation.guarantee or not recommendation.agreeing_folds:
        questions = "on these questions"
    else:
        questions = f"on held-out questions ({format_percent(recommendation.held_out_skipped.value)} skipped)"
    difference = recommendation.difference
    text = (
        f"Measured {questions}: {format_points(difference.value or 0.0)} points of accuracy against always retrieving"
        f"{format_interval(difference)}"
    )
    return f"{text}." if recommendation.level == "use" else f"{text}, {_describe_doubt(recommendation)}."


def _describe_doubt(recommendation: Recommendation) -> str:
    """Say what is not certain about a gate that is worth a try."""
    low = recommendation.difference.low
    if low is not None and low >= -recommendation.max_loss and recommendation.beats_chance:
        loss = format_point_count(recommendation.max_loss)
        if recommendation.forbidden_slices:
            return f"but {recommendation.forbidden_slices[0].name} certainly loses more than {loss}"
        return f"but only {recommendation.agreeing_folds} of {FOLDS} repeats chose the same gate"
    if low is None or low < -recommendation.max_loss:
        loss = format_point_count(recommendation.max_loss)
        return f"so a loss above {loss} is not ruled out{_suggest_more_questions(recommendation)}"
    return f"but that it chooses better than chance is not certain: {describe_gain(recommendation)}{STRICTER_TEST}"


def _suggest_more_questions(recommendation: Recommendation) -> str:
    """Say how many questions would rule out the loss if the difference stayed the same."""
    difference = recommendation.difference
    distance = (difference.value or 0.0) + recommendation.max_loss
    if difference.low is None or difference.value is None or distance <= 0:
        return ""
    needed = math.ceil(recommendation.n * ((difference.value - difference.low) / distance) ** 2 / 100) * 100
    return f": about {needed:,} questions would show it" if needed < MAX_SUGGESTED_QUESTIONS else ""


def _list_key_figures(
    recommendation: Recommendation, always: QuestionCost, gated: QuestionCost, assumptions: CostAssumptions
) -> list[KeyFigure]:
    difference = recommendation.difference
    return [
        KeyFigure(format_percent(recommendation.skipped.value), "of the searches skipped"),
        KeyFigure(format_points(difference.value or 0.0), f"points of accuracy{format_interval(difference)}"),
        KeyFigure(f"{gated.llm_calls:.2f}", f"LLM calls per question, always retrieving makes {always.llm_calls:.2f}"),
        KeyFigure(
            format_money(_compute_savings(always, gated, assumptions), assumptions),
            f"saved on {SAVINGS_QUESTIONS:,} questions",
        ),
    ]


# --- a negative verdict ---------------------------------------------------------------------------


def _write_negative_headline(recommendation: Recommendation, evaluation: Evaluation) -> str:
    if not evaluation.has_open_answers:
        return "What skipping would cost cannot be seen: no question was answered with passages."
    if recommendation.level == "unknown":
        subject = f"Fewer than {MIN_QUESTIONS} different questions" if recommendation.n > 1 else "One question"
        return f"{subject} cannot show whether a gate pays here."
    return "No gate is worth using here: retrieve for every question."


def _explain_no_gate(recommendation: Recommendation, evaluation: Evaluation) -> list[str]:
    """Explain why no gate is recommended."""
    if not evaluation.has_open_answers:
        return ["Label with passages to see it: `knowgate label` with an index.", *_describe_best_ranking(evaluation)]
    if recommendation.level == "unknown":
        return [f"Label at least {MIN_QUESTIONS}; a few hundred are better. The tables are there, but prove little."]
    return [_find_reason(recommendation, evaluation), *_describe_best_choice(recommendation)]


def _find_reason(recommendation: Recommendation, evaluation: Evaluation) -> str:
    known_share = float(evaluation.table.closed_right.mean())
    known = format_percent(known_share)
    aurocs = [gate.measures["auroc"].value or 0.0 for gate in evaluation.ranking_gates]
    if known_share < LOW_KNOWN_SHARE:
        return f"The LLM answers only {known} of these questions right without passages, so there is little to skip."
    if not aurocs:
        return "No gate was evaluated that tells questions apart."
    if max(aurocs) < LOW_AUROC:
        return (
            f"The LLM knows {known} of these questions, but no gate tells which: the best AUROC is {max(aurocs):.2f}."
        )
    if (recommendation.held_out_skipped.value or 0.0) >= MIN_SKIPPED and not recommendation.beats_chance:
        return (
            f"The LLM knows {known} of these questions, but that gates choose better than chance which "
            "searches to skip is not shown."
        )
    return (
        f"The LLM knows {known} of these questions, but {recommendation.n} do not show that a threshold chosen on "
        f"some of them keeps the loss within {format_point_count(recommendation.max_loss)} on the others and skips "
        "enough: a curve that looks better may be luck, and more questions would tell."
    )


def _describe_best_choice(recommendation: Recommendation) -> list[str]:
    """Describe the best gate and threshold that were found, if any."""
    if recommendation.gate is None:
        return []
    gain = f"; {describe_gain(recommendation)}" if recommendation.gain.value is not None else ""
    return [
        f"The best found, '{recommendation.gate}' at {format_threshold(recommendation.threshold)}, skips "
        f"{format_percent(recommendation.held_out_skipped.value)} on held-out questions, at "
        f"{format_points(recommendation.difference.value or 0.0)} points against always "
        f"retrieving{format_interval(recommendation.difference)}{gain}."
    ]


def _describe_best_ranking(evaluation: Evaluation) -> list[str]:
    """Describe the gate that ranks questions best, if any."""
    gates = [gate for gate in evaluation.ranking_gates if gate.measures["auroc"].value is not None]
    if not gates:
        return []
    best = max(gates, key=lambda gate: gate.measures["auroc"].value or 0.0)
    return [
        f"What the LLM knows can be ranked: '{best.gate}' tells known from unknown questions best, with an AUROC of "
        f"{best.measures['auroc'].format(2)}."
    ]


# --- costs and formats ----------------------------------------------------------------------------


def _describe_savings(always: QuestionCost, gated: QuestionCost, assumptions: CostAssumptions) -> str:
    searches = SAVINGS_QUESTIONS * (always.searches - gated.searches)
    money = _compute_savings(always, gated, assumptions)
    if money is None:
        search_money = format_money(searches * assumptions.price_search, assumptions)
        return (
            f"On {SAVINGS_QUESTIONS:,} questions that saves {searches:,.0f} searches, worth {search_money} at "
            f"{_describe_prices(assumptions)}. What the LLM calls cost is unknown: {_explain_unknown_cost(gated)}."
        )
    result = f"saves {searches:,.0f} searches and {format_money(money, assumptions)}"
    if money < 0:
        extra = format_money(-money, assumptions)
        result = f"saves {searches:,.0f} searches but costs {extra} more, for its drafts"
    return f"On {SAVINGS_QUESTIONS:,} questions that {result}, at {_describe_prices(assumptions)}."


def _describe_always_cost(always: QuestionCost, assumptions: CostAssumptions) -> str:
    per_question = always.money(assumptions)
    prices = _describe_prices(assumptions)
    if per_question is None:
        money = format_money(SAVINGS_QUESTIONS * always.searches * assumptions.price_search, assumptions)
        return (
            f"The searches of {SAVINGS_QUESTIONS:,} such questions cost {money}, at {prices}; what the LLM calls cost "
            f"is unknown: {_explain_unknown_cost(always)}."
        )
    money = format_money(SAVINGS_QUESTIONS * per_question, assumptions)
    return f"Retrieving for {SAVINGS_QUESTIONS:,} such questions costs {money}, at {prices}; no gate can save more."


def _compute_savings(always: QuestionCost, gated: QuestionCost, assumptions: CostAssumptions) -> float | None:
    """Return the money saved on `SAVINGS_QUESTIONS` questions; None if tokens have a price and are unknown."""
    before, after = always.money(assumptions), gated.money(assumptions)
    return None if before is None or after is None else SAVINGS_QUESTIONS * (before - after)


def _explain_unknown_cost(cost: QuestionCost) -> str:
    missing = "passages" if cost.passage_tokens is None else "answers"
    return f"the rows hold no texts of {missing}"


def _describe_prices(assumptions: CostAssumptions) -> str:
    source = "prices assumed here" if assumptions.are_defaults else "your prices"
    return f"{source} ({assumptions.price_search:g} a search, {1e6 * assumptions.price_token:g} a million tokens)"


def format_money(amount: float | None, assumptions: CostAssumptions) -> str:
    """Format an amount of money: in dollars at the default prices, without a currency at others."""
    if amount is None:
        return UNKNOWN_AMOUNT
    digits = f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"
    return f"${digits}" if assumptions.are_defaults else digits


def format_threshold(threshold: float | None) -> str:
    """Format a threshold with three digits."""
    return MISSING_VALUE if threshold is None else f"{threshold:.3g}"


def format_interval(estimate: Estimate) -> str:
    """Format the interval of a difference in points, in parentheses; empty if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" (95 % interval {format_points(estimate.low)} to {format_points(estimate.high)})"


def format_point_count(share: float) -> str:
    """Format a share as a number of percentage points."""
    return f"{100 * share:g} points" if share != 0.01 else "1 point"


def describe_gain(recommendation: Recommendation) -> str:
    """Describe the gain over skipping at random."""
    gain = f"{format_points(recommendation.gain.value or 0.0)} points{format_interval(recommendation.gain)}"
    return f"against as many skips at random it gains {gain}"
