"""The verdict of an evaluation in words, with the numbers that a decision maker needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from knowgate.core.display import MISSING_VALUE, format_percent, format_points
from knowgate.evaluation.cost import (
    SAVINGS_QUESTIONS,
    CostAssumptions,
    CostComparison,
    describe_prices,
    estimate_gated_cost,
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
# Shuffled needs are no better than chance. So many evaluations of shuffled needs still came out at a level, by luck.
N_SHUFFLED, CHANCE_COUNTS = 400, {"use": 3, "try": 108}
NOT_COUNTED = "Not counted: running the judge."
POLICY_HINT = "A policy may do better: `knowgate fit` also trains judges and arbiters on rows like these."
LOW_KNOWN_SHARE = 0.15  # if the LLM knows fewer questions, there is little to skip
MAX_LISTED_SLICES = 3


@dataclass(frozen=True)
class KeyFigure:
    """A number with its meaning. Example: '41.2 %', 'of the searches skipped'."""

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
        costs: Costs of always retrieving, never retrieving and using a gate, and what the gate saves.
        note: How the recommendation was chosen.
        judge_note: Says that the costs do not include running the judge; '' if no judge runs.
    """

    recommendation: Recommendation
    headline: str
    sentences: list[str]
    key_figures: list[KeyFigure]
    costs: CostComparison
    note: str = ""
    judge_note: str = ""

    @property
    def level(self) -> str:
        """How strongly the gate is recommended, as a key of `LEVEL_LABELS`.

        'gains' means that an arbiter makes more answers right, although hardly any search is skipped. A gate that saves
        searches but no money gets 'saves' or 'may-save'.
        """
        level = self.recommendation.level
        if self.recommendation.is_positive and not self.recommendation.saves_searches:
            return "gains"
        return level if self.costs.pays else UNPAID_LEVELS.get(level, level)

    @property
    def label(self) -> str:
        """The level in words, such as 'Worth using' or 'Saves searches, not money'."""
        label = LEVEL_LABELS[self.level]
        saves_no_money = self.level in UNPAID_LEVELS.values()
        # If costs are unknown, the label does not mention money.
        return f"{label}, not money" if saves_no_money and self.costs.money is not None else label

    @property
    def text(self) -> str:
        """Headline and sentences."""
        return " ".join([self.headline, *self.sentences])


def build_verdict(evaluation: Evaluation, assumptions: CostAssumptions, max_loss: float) -> EvaluationVerdict:
    """Recommend a gate, or none, and describe the recommendation in words.

    Args:
        evaluation: Evaluated gates.
        assumptions: Prices and times for savings.
        max_loss: Share of all answers that skipping searches may turn from right to wrong.
    """
    recommendation = recommend(evaluation, max_loss)
    costs = _compare_costs(evaluation, recommendation, assumptions)
    uses_judge = recommendation.gate in evaluation.with_judge or recommendation.arbiter in evaluation.with_judge
    judge_note = NOT_COUNTED if uses_judge else ""
    note, key_figures = "", []
    if recommendation.is_positive:
        headline = _write_headline(recommendation, costs)
        key_figures = _list_key_figures(recommendation, costs)
        if not recommendation.guarantee:
            note = _describe_choice(recommendation, evaluation)
        sentences = [
            _describe_chance(recommendation),
            recommendation.guarantee,
            _describe_difference(recommendation),
            _describe_arbiter(evaluation, recommendation),
            _describe_losing_slices(recommendation),
            _describe_calls(costs, assumptions.search_seconds),
            _warn_about_distance(recommendation, evaluation),
        ]
        if recommendation.saves_searches:
            sentences.append(f"{describe_savings(costs, assumptions)} {judge_note}".rstrip())
    else:
        headline, *sentences = _explain_no_gate(recommendation, evaluation)
        sentences.append(_describe_arbiter(evaluation, recommendation))
        sentences.append(_describe_always_cost(evaluation, costs, assumptions))
    written = [sentence for sentence in sentences if sentence]  # those that have nothing to say are empty
    return EvaluationVerdict(recommendation, headline, written, key_figures, costs, note, judge_note)


def _compare_costs(
    evaluation: Evaluation, recommendation: Recommendation, assumptions: CostAssumptions
) -> CostComparison:
    """Compare the costs of always retrieving, never retrieving and using the recommended gate.

    If no gate is recommended, always retrieving takes its place.
    """
    table = evaluation.table
    no_skips = np.zeros(len(table.rows), dtype=bool)
    always_cost = estimate_gated_cost(table, no_skips, None)
    never_cost = estimate_gated_cost(table, ~no_skips, None)
    gated_cost = always_cost
    if recommendation.gate:
        gate = None if recommendation.is_without_retrieval else evaluation.gate(recommendation.gate).scores
        has_arbiter = bool(recommendation.arbiter)
        gated_cost = estimate_gated_cost(table, recommendation.held_out_skips, gate, has_arbiter=has_arbiter)
    return CostComparison(always_cost, never_cost, gated_cost, assumptions.prices)


def _describe_arbiter(evaluation: Evaluation, recommendation: Recommendation) -> str:
    """Describe what the arbiter achieves alone, after every search. It picks the answer with or without passages.

    Returns '' if there is no arbiter, or if the recommended policy uses it, so that other sentences include its effect.
    """
    cascade = evaluation.cascade
    is_recommended = recommendation.is_positive and recommendation.arbiter
    if cascade is None or recommendation.is_without_retrieval or is_recommended:
        return ""
    change = next(result.against_always for result in cascade.results if result.gate == "always")
    points = f"{format_points(change.value or 0.0)} points against always retrieving{format_interval(change)}"
    return f"The arbiter '{cascade.arbiter}' after every search: {points}."


def _describe_losing_slices(recommendation: Recommendation) -> str:
    """Name the large groups of questions that certainly lose answers, or return ''."""
    slices = recommendation.losing_slices[:MAX_LISTED_SLICES]
    parts = [f"{part.name} {format_points_estimate(part.change)} (n = {part.n:,})" for part in slices]
    return f"It loses answers on: {'; '.join(parts)}." if parts else ""


def _describe_calls(costs: CostComparison, search_seconds: float) -> str:
    """State the searches, LLM calls, searching time and deciding time per question."""
    always, gated = costs.always, costs.gated
    deciding = "an unknown time" if gated.decision_seconds is None else f"{1_000 * gated.decision_seconds:.1f} ms"
    return (
        f"Per question it makes {gated.searches:.2f} searches and {gated.calls:.2f} LLM calls (always retrieving: "
        f"{always.searches:.2f} and {always.calls:.2f}). At {search_seconds:g} s a search, searching takes "
        f"{gated.searches * search_seconds:.3g} s (always retrieving: {search_seconds:g} s); deciding takes {deciding}."
    )


def _warn_about_distance(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Return a warning if many questions are unlike the gate's training questions."""
    if recommendation.is_without_retrieval:
        return ""
    scores = evaluation.gate(str(recommendation.gate)).scores
    return format_far_warning(scores.gate, scores.far, recommendation.n)  # `far` is the share of such questions


# --- a positive verdict ---------------------------------------------------------------------------


def _write_headline(recommendation: Recommendation, costs: CostComparison) -> str:
    """Write the advice in one sentence, including the doubts."""
    is_certain = recommendation.level == "use"
    doubt = "" if is_certain else f", but {_describe_doubt(recommendation)}"
    if recommendation.is_without_retrieval:
        advice = "Do without retrieval here" if is_certain else "Retrieval hardly pays here: try without"
        return f"{advice}{doubt}. No gate is needed for that."
    arbiter = f" with the arbiter '{recommendation.arbiter}'" if recommendation.arbiter else ""
    if not recommendation.saves_searches:
        return f"'{recommendation.gate}' always retrieves{arbiter}: more right answers for more LLM calls{doubt}."
    own_threshold = "its own threshold " if recommendation.at_own_threshold else ""
    setting = f"'{recommendation.gate}' at {own_threshold}{format_threshold(recommendation.threshold)}{arbiter}"
    if costs.pays:
        verb = "Use" if is_certain else "Try"
        return f"{verb} {setting}{doubt}."
    if costs.money is None:
        return f"{setting} pays if an LLM call costs less than {format_price(costs.break_even_call)}{doubt}."
    return f"{setting} saves no money at these prices, so it is not worth it."


def _describe_choice(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Describe the choice of gate and threshold, and the stored guarantees."""
    if recommendation.at_own_threshold or not recommendation.agreeing_folds:
        start = "The gate and its threshold were not chosen on these questions, so all of them are held out."
        return f"{start} {_list_guarantees(evaluation)}"
    return (
        f"Gate and threshold were chosen on these questions, to lose no more than "
        f"{format_point_count(recommendation.max_loss)}. The choice was then repeated {FOLDS} times, each time without "
        f"another fifth of the questions: {recommendation.agreeing_folds} of {FOLDS} times it was the same gate. These "
        f"fifths are the held-out questions. On all questions, {format_threshold(recommendation.threshold)} skips "
        f"{format_percent(recommendation.skipped.value)}. {_list_guarantees(evaluation)}"
    )


def _list_guarantees(evaluation: Evaluation) -> str:
    """Say which gates have a guarantee (proof of few lost answers), or how to get one.

    A guarantee holds for the threshold that a gate has stored, not for one that was chosen here.
    Example: "This choice has no guarantee. One is stored with 'a': It loses 1 %. One is stored with 'b': It loses 2 %."
    """
    guarantees = {name: guarantee.text for name, guarantee in evaluation.guarantees.items() if guarantee.text}
    sentences = [f"One is stored with '{name}': {text.rstrip('.')}." for name, text in guarantees.items()]
    if not sentences:
        has_stored_decisions = any(gate.gate in evaluation.table.recorded_needs for gate in evaluation.gates)
        advice = (
            "fit the gate and run `knowgate calibrate` on its folder"
            if has_stored_decisions
            else "run `knowgate calibrate`"
        )
        sentences = [f"To get one, {advice}."]
    return " ".join(["This choice has no guarantee.", *sentences])


def _describe_difference(recommendation: Recommendation) -> str:
    """Say how many searches are skipped, and how accuracy changes."""
    difference = f"{format_points(recommendation.difference.value or 0.0)} points of accuracy against always retrieving"
    skipped = f"it skips {format_percent(recommendation.held_out_skipped.value)} of the searches"
    questions = _name_questions(recommendation).capitalize()
    return f"{questions} {skipped}: {difference}{format_interval(recommendation.difference)}."


def _name_questions(recommendation: Recommendation) -> str:
    """Say on which questions a recommendation was measured: on held-out ones if cross-validation chose the gate."""
    was_chosen_here = recommendation.agreeing_folds and not recommendation.at_own_threshold
    return "on held-out questions" if was_chosen_here else "on these questions"


def _describe_chance(recommendation: Recommendation) -> str:
    """Say whether the verdict may be chance, and whether the gate is certainly better than random skips."""
    sentences = []
    was_chosen_here = bool(recommendation.agreeing_folds)  # a choice can be lucky
    if was_chosen_here and not recommendation.is_without_retrieval:
        count = CHANCE_COUNTS[recommendation.level]
        is_frequent = count > 0.05 * N_SHUFFLED  # more than one in twenty
        doubt = "this one may be chance, too" if is_frequent else "this one is probably not chance"
        sentences.append(f"Of {N_SHUFFLED} evaluations with shuffled scores, {count} got this verdict, so {doubt}.")
    if not recommendation.beats_chance:
        sentences.append(f"{describe_gain(recommendation).capitalize()}{STRICTER_TEST}.")
    return " ".join(sentences)


def _describe_doubt(recommendation: Recommendation) -> str:
    """Say in a few words why a gate is not certainly useful."""
    low = recommendation.difference.low
    loss = format_point_count(recommendation.max_loss)
    if low is None or low < -recommendation.max_loss:
        return f"a loss above {loss} is not ruled out: more questions would show it"
    if not recommendation.beats_chance:
        return "it is not certain that it chooses better than chance"
    if recommendation.forbidden_slices:
        return f"{recommendation.forbidden_slices[0].name} certainly loses more than {loss}"
    return f"only {recommendation.agreeing_folds} of {FOLDS} repeats chose the same gate"


def _list_key_figures(recommendation: Recommendation, costs: CostComparison) -> list[KeyFigure]:
    """List the key figures: searches skipped, accuracy, LLM calls and money."""
    difference = recommendation.difference
    skipped = f"of the searches skipped {_name_questions(recommendation)}"
    calls = f"LLM calls per question, always retrieving makes {costs.always.calls:.2f}"
    figures = [
        KeyFigure(format_percent(recommendation.held_out_skipped.value), skipped),
        KeyFigure(format_points(difference.value or 0.0), f"points of accuracy{format_interval(difference)}"),
        KeyFigure(f"{costs.gated.calls:.2f}", calls),
    ]
    return [*figures, _make_money_figure(costs)] if recommendation.saves_searches else figures


def _make_money_figure(costs: CostComparison) -> KeyFigure:
    """Make the figure of the money saved. If unknown, show the highest profitable price of an LLM call."""
    if costs.money is None:
        return KeyFigure(format_price(costs.break_even_call), "per LLM call: it pays below this price")
    verb = "saved" if costs.money >= 0 else "extra cost"
    return KeyFigure(format_money(SAVINGS_QUESTIONS * abs(costs.money)), f"{verb} on {SAVINGS_QUESTIONS:,} questions")


# --- a negative verdict ---------------------------------------------------------------------------


def _explain_no_gate(recommendation: Recommendation, evaluation: Evaluation) -> list[str]:
    """Explain why no gate is recommended, and what to do. The first text is the headline."""
    if not evaluation.has_open_answers:
        return [
            "The cost of skipping is unknown, because no question was answered with passages.",
            "Label with passages to see it: `knowgate label` with an index.",
            _describe_best_ranking(evaluation),
        ]
    if not evaluation.ranking_gates:
        return [
            "No gate could be evaluated on these rows.",
            "Fit a policy on them with `knowgate fit`, then evaluate it on other questions.",
        ]
    if recommendation.level == "unknown":
        return [
            f"Fewer than {MIN_QUESTIONS} different questions cannot show whether a gate pays here.",
            f"Label at least {MIN_QUESTIONS}; a few hundred are better. The tables are there, but prove little.",
        ]
    headline = "No gate is worth using here: retrieve for every question."
    best_choice = _describe_best_choice(recommendation)
    if recommendation.at_own_threshold:  # a single gate was judged, at its own calibrated threshold
        return [headline, best_choice]
    return [headline, _find_reason(recommendation, evaluation), best_choice, POLICY_HINT]


def _find_reason(recommendation: Recommendation, evaluation: Evaluation) -> str:
    """Say why no gate is worth using."""
    known_share = float(evaluation.table.closed_book_right.mean())
    known = format_percent(known_share)
    if known_share < LOW_KNOWN_SHARE:
        return f"The LLM answers only {known} of these questions right without passages, so there is little to skip."
    if (recommendation.held_out_skipped.value or 0.0) >= MIN_SKIPPED and not recommendation.beats_chance:
        return f"The LLM knows {known} of these questions, but no gate is shown to be better than skipping at random."
    return (
        f"The LLM knows {known} of these questions, but {recommendation.n} questions do not show that a threshold skips "
        f"enough and loses at most {format_point_count(recommendation.max_loss)} on new questions."
    )


def _describe_best_choice(recommendation: Recommendation) -> str:
    """Describe the best gate and threshold found, or return ''."""
    if recommendation.gate is None:
        return ""
    gain = f"; {describe_gain(recommendation)}" if recommendation.gain.value is not None else ""
    kind = "At its own threshold" if recommendation.at_own_threshold else "The best found"
    return (
        f"{kind}, '{recommendation.gate}' at {format_threshold(recommendation.threshold)}, skips "
        f"{format_percent(recommendation.held_out_skipped.value)} {_name_questions(recommendation)}, at "
        f"{format_points(recommendation.difference.value or 0.0)} points against always "
        f"retrieving{format_interval(recommendation.difference)}{gain}."
    )


def _describe_best_ranking(evaluation: Evaluation) -> str:
    """Describe the gate with the highest AUROC, or return ''. AUROC says how well unknown questions are told apart."""
    gates = [gate for gate in evaluation.ranking_gates if gate.measures["auroc"].value is not None]
    if not gates:
        return ""
    best = max(gates, key=lambda gate: gate.measures["auroc"].value or 0.0)
    return (
        f"What the LLM knows can be ranked: '{best.gate}' tells known from unknown questions best, with an AUROC of "
        f"{best.measures['auroc'].format(2)}."
    )


# --- costs and formats ----------------------------------------------------------------------------


def describe_savings(costs: CostComparison, assumptions: CostAssumptions) -> str:
    """Describe what a gate saves, and at which price it would cost as much as always retrieving."""
    start = f"On {SAVINGS_QUESTIONS:,} questions that saves {SAVINGS_QUESTIONS * costs.searches:,.0f} searches"
    prices = describe_prices(assumptions)
    if costs.money is None:
        worth = format_money(SAVINGS_QUESTIONS * costs.search_money)
        calls = f"{SAVINGS_QUESTIONS * (costs.extra_calls or 0.0):,.0f}"
        missing = "passages" if costs.gated.prompt is None else "answers"
        return (
            f"{start}, worth {worth} at {prices}, and makes {calls} more LLM calls. What these cost is unknown: the rows "
            f"hold no texts of {missing}. Break-even: {worth} / {calls} = {format_price(costs.break_even_call)} a call."
        )
    money = format_money(SAVINGS_QUESTIONS * abs(costs.money))
    if costs.money < 0:
        price = format_price(costs.break_even)
        break_even = f"; it pays if a search costs more than {price}" if costs.break_even else ""
        return f"{start}, but costs {money} more at {prices}{break_even}."
    if costs.gated.money(costs.prices) is None:  # the cost of the LLM is unknown, but not higher: only searches count
        return f"{start}, worth {money} at {prices}, and makes no more LLM calls."
    return f"{start} and {money}, at {prices}."


def _describe_always_cost(evaluation: Evaluation, costs: CostComparison, assumptions: CostAssumptions) -> str:
    """Say the cost of always retrieving, or return '' if unknown."""
    per_question = costs.always.money(costs.prices)
    if not evaluation.has_open_answers or per_question is None:
        return ""
    money = format_money(SAVINGS_QUESTIONS * per_question)
    prices = describe_prices(assumptions)
    return f"Retrieving for {SAVINGS_QUESTIONS:,} such questions costs {money}, at {prices}."


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
    """Say the accuracy gain of a gate over skipping as many searches at random."""
    gain = f"{format_points(recommendation.gain.value or 0.0)} points{format_interval(recommendation.gain)}"
    return f"against as many skips at random it gains {gain}"
