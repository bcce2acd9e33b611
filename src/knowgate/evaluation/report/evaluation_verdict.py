"""The verdict of an evaluation in words, with the numbers that a decision maker needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from knowgate.core.display import MISSING_VALUE, format_percent, format_points
from knowgate.evaluation.cost import (
    SAVINGS_QUESTIONS,
    CostAssumptions,
    QuestionCost,
    Savings,
    describe_prices,
    estimate_always_cost,
    estimate_gated_cost,
    estimate_never_cost,
    format_money,
    format_price,
)
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.recommendation import FOLDS, MIN_QUESTIONS, MIN_SKIPPED, Z_CERTAIN, Recommendation, recommend
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_points_estimate

STRICTER_TEST = f"; a gate that was chosen among several must gain more than {Z_CERTAIN:.1f} standard errors"
LEVEL_LABELS = {
    "use": "Worth using",
    "try": "Worth a try",
    "saves": "Saves searches",
    "may-save": "May save searches",
    "gains": "More right answers",
    "leave": "Not worth it",
    "unknown": "Cannot be said",
}
# Levels of a recommendation that is not known to save money.
UNPAID_LEVELS = {"use": "saves", "try": "may-save"}
# How many of 400 evaluations of shuffled needs came out at a level.
CHANCE_COUNTS = {"use": 3, "try": 108}
NOT_COUNTED = "Not counted: running the judge."
LOW_KNOWN_SHARE = 0.15  # if the LLM knows fewer questions, there is little to skip
LOW_AUROC = 0.65  # a gate with less hardly tells known from unknown questions
MAX_SUGGESTED_QUESTIONS = 50_000
MAX_LISTED_SLICES = 3


@dataclass(frozen=True)
class KeyFigure:
    """A number that stands out, such as '41.2 %', and what it is, such as 'of the searches skipped'."""

    value: str
    description: str


@dataclass(frozen=True)
class EvaluationVerdict:
    """A recommendation in words.

    Attributes:
        recommendation: The recommendation.
        headline: What to do.
        sentences: Why, and how certain that is.
        key_figures: The most important numbers.
        savings: What the recommended gate saves against always retrieving.
        never: Mean cost per question of never retrieving.
        note: How the recommendation was chosen.
        not_counted: Sentence about costs that are not counted; '' if there are none.
    """

    recommendation: Recommendation
    headline: str
    sentences: list[str]
    key_figures: list[KeyFigure]
    savings: Savings
    never: QuestionCost
    note: str = ""
    not_counted: str = ""

    @property
    def level(self) -> str:
        """The level of the recommendation: 'use', 'try', 'leave' or 'unknown', and these variants of the first two.

        'saves' (for 'use') and 'may-save' (for 'try') if it is not known to save money, 'gains' if it saves no searches.
        """
        level = self.recommendation.level
        if self.recommendation.is_positive and self.recommendation.skips_nothing:
            return "gains"
        return level if self.savings.pays else UNPAID_LEVELS.get(level, level)

    @property
    def label(self) -> str:
        """The level in words, such as 'Worth using' or, if it is known to save no money, 'Saves searches, not money'."""
        is_unpaid = self.level in UNPAID_LEVELS.values() and self.savings.money is not None
        return f"{LEVEL_LABELS[self.level]}, not money" if is_unpaid else LEVEL_LABELS[self.level]

    @property
    def text(self) -> str:
        """Headline and sentences."""
        return " ".join([self.headline, *self.sentences])


def build_verdict(evaluation: Evaluation, assumptions: CostAssumptions, max_loss: float) -> EvaluationVerdict:
    """Recommend a gate, or none, and describe the recommendation in words.

    Costs are means per question: of always retrieving, of never retrieving, and of the recommended gate. The arbiter, if
    there is one, chooses between the answers with and without passages after a search.

    Args:
        evaluation: Evaluated gates.
        assumptions: Prices and times for savings.
        max_loss: Share of all answers that skipping searches may turn from right to wrong.
    """
    recommendation = recommend(evaluation, max_loss)
    always_cost, never_cost = estimate_always_cost(evaluation.table), estimate_never_cost(evaluation.table)
    gated_cost = _estimate_recommended_cost(evaluation, recommendation) if recommendation.gate else always_cost
    savings = Savings(always_cost, gated_cost, assumptions)
    arbiter_sentences = _describe_arbiter(evaluation, recommendation)
    uses_judge = recommendation.gate in evaluation.with_judge or recommendation.arbiter in evaluation.with_judge
    not_counted = NOT_COUNTED if uses_judge else ""
    if not recommendation.is_positive:
        sentences = [*_explain_no_gate(recommendation, evaluation), *arbiter_sentences]
        if evaluation.has_open_answers:
            sentences.append(_describe_always_cost(always_cost, assumptions))
        headline = _write_negative_headline(recommendation, evaluation)
        return EvaluationVerdict(recommendation, headline, sentences, [], savings, never_cost, not_counted=not_counted)
    sentences = [
        _describe_chance(recommendation),
        recommendation.guarantee,
        _describe_difference(recommendation),
        *arbiter_sentences,
        _describe_losing_slices(recommendation),
        _describe_calls(savings),
        _warn_about_distance(recommendation, evaluation),
        "" if recommendation.skips_nothing else f"{describe_savings(savings)} {not_counted}".rstrip(),
    ]
    return EvaluationVerdict(
        recommendation,
        _write_headline(recommendation, savings),
        [sentence for sentence in sentences if sentence],
        _list_key_figures(recommendation, savings),
        savings,
        never_cost,
        note="" if recommendation.guarantee else _describe_choice(recommendation, evaluation),
        not_counted=not_counted,
    )


def _estimate_recommended_cost(evaluation: Evaluation, recommendation: Recommendation) -> QuestionCost:
    """Estimate the mean cost per question of the recommended gate, on the questions that its accuracy is measured on."""
    gate = None if recommendation.is_without_retrieval else evaluation.gate(str(recommendation.gate))
    skips, has_arbiter = recommendation.held_out_skips, bool(recommendation.arbiter)
    return estimate_gated_cost(evaluation.table, skips, gate, has_arbiter=has_arbiter)


def _describe_arbiter(evaluation: Evaluation, recommendation: Recommendation) -> list[str]:
    """Describe what the arbiter, which chooses between both answers, changes if it follows every search.

    Empty if there is no arbiter, nothing to retrieve, or if the recommendation includes the arbiter.
    """
    cascade = evaluation.cascade
    is_included = recommendation.is_positive and recommendation.arbiter
    if cascade is None or recommendation.is_without_retrieval or is_included:
        return []
    always = next(result for result in cascade.lines if result.gate == "always")
    change = f"{format_points(always.against_always.value or 0.0)} points against always retrieving"
    return [f"The arbiter '{cascade.arbiter}' after every search: {change}{format_interval(always.against_always)}."]


def _describe_losing_slices(recommendation: Recommendation) -> str:
    """Name the large slices (groups of questions, such as a language) that certainly lose answers; "" without any."""
    slices = recommendation.losing_slices[:MAX_LISTED_SLICES]
    parts = [f"{part.name} {format_points_estimate(part.change)} (n = {part.n:,})" for part in slices]
    return f"It loses answers on: {'; '.join(parts)}." if parts else ""


def _describe_calls(savings: Savings) -> str:
    """State the searches, LLM calls, searching time and deciding time per question."""
    always, gated, duration = savings.always, savings.gated, savings.assumptions.search_seconds
    deciding = "an unknown time" if gated.decision_seconds is None else f"{1_000 * gated.decision_seconds:.1f} ms"
    return (
        f"Per question it makes {gated.searches:.2f} searches and {gated.calls:.2f} LLM calls (always retrieving: "
        f"{always.searches:.2f} and {always.calls:.2f}). At {duration:g} s a search, searching takes "
        f"{gated.searches * duration:.3g} s (always retrieving: {duration:g} s); deciding takes {deciding}."
    )


def _warn_about_distance(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Warn if many questions are unlike those the recommended gate was fitted on."""
    if recommendation.is_without_retrieval:
        return ""
    gate = evaluation.gate(str(recommendation.gate))
    return format_far_warning(gate.gate, gate.far_share, recommendation.n)


# --- a positive verdict ---------------------------------------------------------------------------


def _write_headline(recommendation: Recommendation, savings: Savings) -> str:
    """Write the advice of a recommendation to use or try a gate, or to do without retrieval, and what is in doubt."""
    is_certain = recommendation.level == "use"
    doubt = "" if is_certain else f", but {_describe_doubt(recommendation)}"
    if recommendation.is_without_retrieval:
        advice = "Do without retrieval here" if is_certain else "Retrieval hardly pays here: try without"
        return f"{advice}{doubt}. No gate is needed for that."
    arbiter = f" with the arbiter '{recommendation.arbiter}'" if recommendation.arbiter else ""
    kind = "its own threshold " if recommendation.at_own_threshold else ""
    setting = f"'{recommendation.gate}' at {kind}{format_threshold(recommendation.threshold)}{arbiter}"
    if recommendation.skips_nothing:
        return f"'{recommendation.gate}' always retrieves{arbiter}: more right answers for more LLM calls{doubt}."
    if savings.pays:
        return f"{'Use' if is_certain else 'Try'} {setting}{doubt}."
    if savings.money is None:
        return f"{setting} pays if an LLM call costs less than {format_price(savings.break_even_call)}{doubt}."
    return f"{setting} saves no money at these prices, so it is not worth it."


def _describe_choice(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Describe how gate and threshold were chosen, and which proofs of a small loss (guarantees) are stored."""
    if recommendation.at_own_threshold or not recommendation.agreeing_folds:
        return f"Nothing was chosen on these questions, so all of them measure it. {_list_guarantees(evaluation)}."
    return (
        f"Gate and threshold were chosen on these questions, to lose no more than "
        f"{format_point_count(recommendation.max_loss)}. The choice was then repeated {FOLDS} times, each time without "
        f"another fifth of the questions: {recommendation.agreeing_folds} of {FOLDS} times it was the same gate. These "
        f"fifths are the held-out questions. On all questions, {format_threshold(recommendation.threshold)} skips "
        f"{format_percent(recommendation.skipped.value)}. "
        f"{_list_guarantees(evaluation)}."
    )


def _list_guarantees(evaluation: Evaluation) -> str:
    """List the stored guarantees (proofs of a small loss) of the gates; none of them applies to the recommendation."""
    texts = [f"with '{name}': {item.text}" for name, item in evaluation.guarantees.items() if item.text]
    if texts:
        return f"This choice has no guarantee; one is stored {' One is stored '.join(texts)}".rstrip(".")
    if any(gate.gate in evaluation.table.recorded_needs for gate in evaluation.gates):
        return "This choice has no guarantee. To get one, fit the gate and run `knowgate calibrate` on its folder"
    return "This choice has no guarantee. To get one, run `knowgate calibrate`"


def _describe_difference(recommendation: Recommendation) -> str:
    """Say how many searches are skipped, how accuracy changes by that, and on which questions."""
    difference = f"{format_points(recommendation.difference.value or 0.0)} points of accuracy against always retrieving"
    skipped = f"it skips {format_percent(recommendation.held_out_skipped.value)} of the searches"
    questions = _name_questions(recommendation).capitalize()
    return f"{questions} {skipped}: {difference}{format_interval(recommendation.difference)}."


def _name_questions(recommendation: Recommendation) -> str:
    """Name the questions that the verdict is measured on: held-out ones, if gate and threshold were chosen here."""
    was_chosen_here = recommendation.agreeing_folds and not recommendation.at_own_threshold
    return "on held-out questions" if was_chosen_here else "on these questions"


def _describe_chance(recommendation: Recommendation) -> str:
    """Say how often meaningless scores get the same verdict, if a gate was chosen here, and its gain if that is small."""
    is_chosen_gate = recommendation.agreeing_folds and not recommendation.is_without_retrieval
    count = CHANCE_COUNTS[recommendation.level] if is_chosen_gate else 0
    doubt = "this one may be chance, too" if count > 0.05 * 400 else "this one is hardly chance"
    verdicts = f"Of 400 evaluations with shuffled scores, {count} got this verdict, so {doubt}" if count else ""
    gain = "" if recommendation.beats_chance else f"{describe_gain(recommendation).capitalize()}{STRICTER_TEST}"
    return "".join(f"{sentence}. " for sentence in (verdicts, gain) if sentence).rstrip()


def _describe_doubt(recommendation: Recommendation) -> str:
    """Say in a few words what is not certain about a gate that is worth a try."""
    low, loss = recommendation.difference.low, format_point_count(recommendation.max_loss)
    if low is None or low < -recommendation.max_loss:
        return f"a loss above {loss} is not ruled out{_suggest_more_questions(recommendation)}"
    if not recommendation.beats_chance:
        return "it is not certain that it chooses better than chance"
    if recommendation.forbidden_slices:
        return f"{recommendation.forbidden_slices[0].name} certainly loses more than {loss}"
    return f"only {recommendation.agreeing_folds} of {FOLDS} repeats chose the same gate"


def _suggest_more_questions(recommendation: Recommendation) -> str:
    """Say how many questions would rule out the loss if the difference stayed the same; '' if none or too many would.

    The half-width of an interval shrinks with the root of the number of questions.
    """
    difference = recommendation.difference
    allowed_half_width = (difference.value or 0.0) + recommendation.max_loss
    if difference.low is None or difference.value is None or allowed_half_width <= 0:
        return ""
    half_width = difference.value - difference.low
    needed = math.ceil(recommendation.n * (half_width / allowed_half_width) ** 2 / 100) * 100  # in full hundreds
    return f": about {needed:,} questions would show it" if needed < MAX_SUGGESTED_QUESTIONS else ""


def _list_key_figures(recommendation: Recommendation, savings: Savings) -> list[KeyFigure]:
    """List the numbers that stand out: searches skipped, accuracy, LLM calls and money, all of the same questions."""
    difference = recommendation.difference
    skipped = f"of the searches skipped {_name_questions(recommendation)}"
    calls = f"LLM calls per question, always retrieving makes {savings.always.calls:.2f}"
    return [
        KeyFigure(format_percent(recommendation.held_out_skipped.value), skipped),
        KeyFigure(format_points(difference.value or 0.0), f"points of accuracy{format_interval(difference)}"),
        KeyFigure(f"{savings.gated.calls:.2f}", calls),
        *([] if recommendation.skips_nothing else [_make_money_figure(savings)]),
    ]


def _make_money_figure(savings: Savings) -> KeyFigure:
    """Show the money saved, the extra cost or, if it is unknown, the price of an LLM call at which the gate breaks even."""
    if savings.money is None:
        return KeyFigure(format_price(savings.break_even_call), "per LLM call: it pays below this price")
    scope = "" if savings.includes_llm else ", searches alone"
    verb = "saved" if savings.money >= 0 else "extra cost"
    return KeyFigure(format_money(abs(savings.money)), f"{verb} on {SAVINGS_QUESTIONS:,} questions{scope}")


# --- a negative verdict ---------------------------------------------------------------------------


def _write_negative_headline(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Say that no gate is recommended, or why that cannot be said."""
    if not evaluation.has_open_answers:
        return "The cost of skipping is unknown, because no question was answered with passages."
    if not evaluation.ranking_gates:
        return "No gate could be evaluated on these rows."
    if recommendation.level == "unknown":
        subject = f"Fewer than {MIN_QUESTIONS} different questions" if recommendation.n > 1 else "One question"
        return f"{subject} cannot show whether a gate pays here."
    return "No gate is worth using here: retrieve for every question."


def _explain_no_gate(recommendation: Recommendation, evaluation: Evaluation) -> list[str]:
    """Return sentences that explain why no gate is recommended, and what to do about it."""
    if not evaluation.has_open_answers:
        return ["Label with passages to see it: `knowgate label` with an index.", *_describe_best_ranking(evaluation)]
    if not evaluation.ranking_gates:
        return ["Fit a policy on them with `knowgate fit`, then evaluate it on other questions."]
    if recommendation.level == "unknown":
        return [f"Label at least {MIN_QUESTIONS}; a few hundred are better. The tables are there, but prove little."]
    reason = [] if recommendation.at_own_threshold else [_find_reason(recommendation, evaluation)]
    return [*reason, *_describe_best_choice(recommendation)]


def _find_reason(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Say why no gate is worth using: the LLM knows too little, or the gates do not tell what it knows."""
    known_share = float(evaluation.table.closed_right.mean())
    known = format_percent(known_share)
    aurocs = [gate.measures["auroc"].value or 0.0 for gate in evaluation.ranking_gates]
    if known_share < LOW_KNOWN_SHARE:
        return f"The LLM answers only {known} of these questions right without passages, so there is little to skip."
    knows = f"The LLM knows {known} of these questions, but"
    if max(aurocs) < LOW_AUROC:
        return f"{knows} no gate tells which: the best AUROC is {max(aurocs):.2f}."
    if (recommendation.held_out_skipped.value or 0.0) >= MIN_SKIPPED and not recommendation.beats_chance:
        return f"{knows} no gate is shown to choose the searches to skip better than chance."
    return (
        f"{knows} {recommendation.n} questions do not show that a threshold skips enough and loses at most "
        f"{format_point_count(recommendation.max_loss)} on new questions. Label more questions."
    )


def _describe_best_choice(recommendation: Recommendation) -> list[str]:
    """Describe the best gate and threshold that were found, if any."""
    if recommendation.gate is None:
        return []
    gain = f"; {describe_gain(recommendation)}" if recommendation.gain.value is not None else ""
    is_own = recommendation.at_own_threshold
    kind, questions = ("At its own threshold", "these") if is_own else ("The best found", "held-out")
    return [
        f"{kind}, '{recommendation.gate}' at {format_threshold(recommendation.threshold)}, skips "
        f"{format_percent(recommendation.held_out_skipped.value)} on {questions} questions, at "
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


def describe_savings(savings: Savings) -> str:
    """Describe in one to three sentences what a gate saves, and at which price it breaks even."""
    start = f"On {SAVINGS_QUESTIONS:,} questions that saves {savings.searches:,.0f} searches"
    prices = describe_prices(savings.assumptions)
    if savings.money is None:
        worth = format_money(savings.search_money)
        return (
            f"{start}, worth {worth} at {prices}, and makes {savings.extra_calls:,.0f} more LLM calls. What these cost "
            f"is unknown: {_explain_unknown_cost(savings.gated)}. Break-even: {worth} / {savings.extra_calls:,.0f} = "
            f"{format_price(savings.break_even_call)} a call."
        )
    if savings.money < 0:
        price = savings.gated.break_even(savings.always, savings.assumptions.prices)
        break_even = f"; it pays if a search costs more than {format_price(price)}" if price else ""
        return f"{start}, but costs {format_money(-savings.money)} more at {prices}{break_even}."
    if not savings.includes_llm:
        return f"{start}, worth {format_money(savings.money)} at {prices}, and makes no more LLM calls."
    return f"{start} and {format_money(savings.money)}, at {prices}."


def _explain_unknown_cost(cost: QuestionCost) -> str:
    """Say which texts are missing to know the cost."""
    missing = "passages" if cost.prompt is None else "answers"
    return f"the rows hold no texts of {missing}"


def _describe_always_cost(always: QuestionCost, assumptions: CostAssumptions) -> str:
    """Say what always retrieving costs."""
    per_question = always.money(assumptions.prices)
    prices = describe_prices(assumptions)
    if per_question is None:
        money = format_money(SAVINGS_QUESTIONS * always.searches * assumptions.price_search)
        return (
            f"The searches of {SAVINGS_QUESTIONS:,} such questions cost {money}, at {prices}; what the LLM calls cost "
            f"is unknown: {_explain_unknown_cost(always)}."
        )
    money = format_money(SAVINGS_QUESTIONS * per_question)
    return f"Retrieving for {SAVINGS_QUESTIONS:,} such questions costs {money}, at {prices}; no gate can save more."


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
