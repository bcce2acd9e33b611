"""What an evaluation comes to, in words: for a manager on the page, for everybody on the terminal."""

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
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.recommendation import FOLDS, MIN_QUESTIONS, MIN_SKIPPED, Recommendation, recommend
from knowgate.gates.artifacts.drift import format_far_warning
from knowgate.stats.bootstrap import Estimate


def format_threshold(threshold: float | None) -> str:
    return MISSING_VALUE if threshold is None else f"{threshold:.3g}"


def format_interval_text(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {format_points(found.low)} to {format_points(found.high)})"


def format_point_count(share: float) -> str:
    return f"{100 * share:g} points" if share != 0.01 else "1 point"


def describe_gain(advice: Recommendation) -> str:
    """What the gate gains over chance."""
    gain = f"{format_points(advice.gain.value or 0.0)} points{format_interval_text(advice.gain)}"
    return f"against as many skips at random it gains {gain}"


LOW_KNOWN_SHARE = 0.15  # share of questions the LLM knows, below which there is little to skip
LOW_AUROC = 0.65  # AUROC below which a gate hardly tells anything


def write_negative_headline(advice: Recommendation, evaluation: Evaluation) -> str:
    if evaluation.trial.open_right is None:
        return "What skipping would cost cannot be seen: no question was answered with passages."
    if advice.light == "unknown":
        shown = f"Fewer than {MIN_QUESTIONS} different questions cannot" if advice.n > 1 else "One question cannot"
        return f"{shown} show whether a gate pays here."
    return "No gate is worth using here: retrieve for every question."


def explain_negative_verdict(advice: Recommendation, evaluation: Evaluation) -> list[str]:
    trial = evaluation.trial
    if trial.open_right is None:
        ranked = _best(evaluation)
        return ["Label with passages to see it: knowgate label --index DIR.", *([ranked] if ranked else [])]
    if advice.light == "unknown":
        return [f"Label at least {MIN_QUESTIONS}; a few hundred are better. The tables are there, but prove little."]
    return [_why(advice, evaluation), *_tried(advice)]


def _why(advice: Recommendation, evaluation: Evaluation) -> str:
    trial = evaluation.trial
    knows = float(trial.closed_right.mean())
    if knows < LOW_KNOWN_SHARE:
        return (
            f"The LLM answers only {format_percent(knows)} of these questions right without passages, so there is little to "
            "skip."
        )
    aurocs = [gate.measures["auroc"].value or 0.0 for gate in evaluation.gates if "auroc" in gate.measures]
    if not aurocs:
        return "No gate was evaluated that tells questions apart."
    if max(aurocs) < LOW_AUROC:
        return (
            f"The LLM knows {format_percent(knows)} of these questions, but no gate tells which: the best AUROC is "
            f"{max(aurocs):.2f}."
        )
    if (advice.tried.value or 0.0) >= MIN_SKIPPED and not advice.beats_chance:
        return (
            f"The LLM knows {format_percent(knows)} of these questions, but that gates choose better than chance which "
            "searches to skip is not shown."
        )
    return (
        f"The LLM knows {format_percent(knows)} of these questions, but {advice.n} do not show that a threshold chosen on "
        f"some of them keeps the loss within {format_point_count(advice.max_loss)} on the others and skips enough: a curve "
        "that looks better may be luck, and more questions would tell."
    )


def _tried(advice: Recommendation) -> list[str]:
    if advice.gate is None:
        return []
    chance = f"; {describe_gain(advice)}" if advice.gain.value is not None else ""
    return [
        f"The best found, '{advice.gate}' at {format_threshold(advice.threshold)}, skips {format_percent(advice.tried.value)} "
        f"on held-out questions, at {format_points(advice.difference.value or 0.0)} points against always "
        f"retrieving{format_interval_text(advice.difference)}{chance}."
    ]


def _best(evaluation: Evaluation) -> str:
    ranked = [
        gate for gate in evaluation.gates if "auroc" in gate.measures and gate.measures["auroc"].value is not None
    ]
    if not ranked:
        return ""
    best = max(ranked, key=lambda gate: gate.measures["auroc"].value or 0.0)
    return (
        f"What the LLM knows can be ranked: '{best.gate}' tells known from unknown questions best, with an AUROC of "
        f"{best.measures['auroc'].format(2)}."
    )


LEVEL_LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}


@dataclass(frozen=True)
class KeyFigure:
    """A figure that stands out, and what it is."""

    value: str
    about: str


@dataclass(frozen=True)
class EvaluationVerdict:
    """headline: what to do; sentences: why, and how sure. note: how it was chosen."""

    advice: Recommendation
    headline: str
    sentences: list[str]
    tiles: list[KeyFigure]
    always: QuestionCost
    gated: QuestionCost
    never: QuestionCost
    note: str = ""

    @property
    def label(self) -> str:
        return LEVEL_LABELS[self.advice.light]

    @property
    def text(self) -> str:
        return " ".join([self.headline, *self.sentences])


def build_verdict(evaluation: Evaluation, assumed: CostAssumptions, max_loss: float) -> EvaluationVerdict:
    advice = recommend(evaluation, max_loss)
    always, never = estimate_always_cost(evaluation.trial), estimate_never_cost(evaluation.trial)
    gated = _spent(evaluation, advice) if advice.gate else always
    behind = _arbiter(evaluation, advice)
    if not advice.is_worth_it:
        reasons = [*explain_negative_verdict(advice, evaluation), *behind]
        reasons += [_costs(always, assumed)] if evaluation.trial.open_right is not None else []
        return EvaluationVerdict(advice, write_negative_headline(advice, evaluation), reasons, [], always, gated, never)
    told = [_skips(advice), *([advice.guarantee] if advice.guarantee else []), _measured(advice)]
    told += [*behind, *([far] if (far := _far(advice, evaluation)) else [])]
    return EvaluationVerdict(
        advice, _headline(advice), [*told, _saves(always, gated, assumed)], _tiles(advice, always, gated, assumed),
        always, gated, never, "" if advice.guarantee else _aimed(advice, evaluation),
    )  # fmt: skip


def _far(advice: Recommendation, evaluation: Evaluation) -> str:
    """A warning where many questions are unlike those the gate was fitted on."""
    if advice.does_without:
        return ""
    gate = evaluation.gate(str(advice.gate))
    return format_far_warning(gate.gate, gate.far, advice.n)


def _arbiter(evaluation: Evaluation, advice: Recommendation) -> list[str]:
    """What an arbiter behind the gate would add, where one was asked."""
    lines = {line.gate: line for line in evaluation.cascade.lines} if evaluation.cascade else {}
    line = lines.get(str(advice.gate) if advice.is_worth_it else "always") or lines.get("always")
    if evaluation.cascade is None or line is None:
        return []
    where = "after every search" if line.gate == "always" else f"behind '{line.gate}' at its own threshold"
    change = f"{format_points(line.against_always.value or 0.0)} points against always retrieving"
    return [f"The arbiter '{evaluation.cascade.arbiter}' {where}: {change}{format_interval_text(line.against_always)}."]


def _spent(evaluation: Evaluation, advice: Recommendation) -> QuestionCost:
    gate = None if advice.does_without else evaluation.gate(str(advice.gate))
    return estimate_gated_cost(evaluation.trial, advice.skips, gate)


# --- yes ------------------------------------------------------------------------------------------


def _headline(advice: Recommendation) -> str:
    if advice.does_without:
        sure = "Do without retrieval here." if advice.light == "use" else "Retrieval hardly pays here: try without."
        return f"{sure} No gate is needed for that."
    verb = "Use" if advice.light == "use" else "Try"
    return f"{verb} '{advice.gate}' at {format_threshold(advice.threshold)}."


def _skips(advice: Recommendation) -> str:
    if advice.does_without:
        return "It saves every search."
    return f"It skips {format_percent(advice.skipped.value)} of the searches."


def _aimed(advice: Recommendation, evaluation: Evaluation) -> str:
    if not advice.agreed:
        return f"Nothing had to be chosen for that, so all questions speak for it. {_stored(evaluation)}."
    chosen = f"Gate and threshold were chosen here to lose no more than {format_point_count(advice.max_loss)}"
    agreed = f"; {advice.agreed} of {FOLDS} repeats without a fifth of the questions chose the same gate."
    return f"{chosen}{agreed} {_stored(evaluation, ': knowgate calibrate gives one')}."


def _stored(evaluation: Evaluation, advice: str = "") -> str:
    """Guarantees of the gates here, none of which is that of what is recommended."""
    if not evaluation.promises:
        on_record = any(gate.gate in evaluation.trial.recorded_needs for gate in evaluation.gates)
        where = " (needs on record keep none, folders of gates do)" if on_record else ""
        return f"No guarantee is stored{where}{advice}"
    told = [f"with '{gate}': {promised.words}" for gate, promised in evaluation.promises.items()]
    return f"No guarantee is stored for that; one is {' One is '.join(told)}".rstrip(".")


def _measured(advice: Recommendation) -> str:
    where = (
        "on these questions"
        if advice.guarantee or not advice.agreed
        else f"on held-out questions ({format_percent(advice.tried.value)} skipped)"
    )
    said = f"Measured {where}: {format_points(advice.difference.value or 0.0)} points of accuracy against always retrieving"
    said += format_interval_text(advice.difference)
    if advice.light == "use":
        return f"{said}."
    return f"{said}, {_doubt(advice)}."


def _doubt(advice: Recommendation) -> str:
    """What keeps it from being shown."""
    found = advice.difference
    if found.low is None or found.low < -advice.max_loss:
        return f"so a loss above {format_point_count(advice.max_loss)} is not ruled out{_more(advice)}"
    return f"but that it chooses better than chance is not certain: {describe_gain(advice)}"


def _more(advice: Recommendation) -> str:
    """How many questions would rule it out, if the difference stayed what it is."""
    found = advice.difference
    room = (found.value or 0.0) + advice.max_loss
    if found.low is None or found.value is None or room <= 0:
        return ""
    needed = math.ceil(advice.n * ((found.value - found.low) / room) ** 2 / 100) * 100
    return f": about {needed:,} questions would show it" if needed < 50_000 else ""


def _saves(always: QuestionCost, gated: QuestionCost, assumed: CostAssumptions) -> str:
    searches = SAVINGS_QUESTIONS * (always.searches - gated.searches)
    money = SAVINGS_QUESTIONS * (always.money(assumed) - gated.money(assumed))
    result = f"saves {searches:,.0f} searches and {format_money(money, assumed)}"
    if money < 0:
        result = f"saves {searches:,.0f} searches but costs {format_money(-money, assumed)} more, for its drafts"
    return f"On {SAVINGS_QUESTIONS:,} questions that {result}, at {_prices(assumed)}."


def _costs(always: QuestionCost, assumed: CostAssumptions) -> str:
    """What is at stake where nothing is recommended."""
    money = format_money(SAVINGS_QUESTIONS * always.money(assumed), assumed)
    return (
        f"Looking up {SAVINGS_QUESTIONS:,} such questions costs {money}, at {_prices(assumed)}; no gate can save more."
    )


def _prices(assumed: CostAssumptions) -> str:
    whose = "prices assumed here" if assumed == CostAssumptions() else "your prices"
    return f"{whose} ({assumed.price_search:g} a search, {1e6 * assumed.price_token:g} a million tokens)"


def format_money(amount: float, assumed: CostAssumptions) -> str:
    """Assumed prices are in dollars; given ones in whatever they were given in."""
    digits = f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"
    return f"${digits}" if assumed == CostAssumptions() else digits


def _tiles(
    advice: Recommendation, always: QuestionCost, gated: QuestionCost, assumed: CostAssumptions
) -> list[KeyFigure]:
    money = SAVINGS_QUESTIONS * (always.money(assumed) - gated.money(assumed))
    return [
        KeyFigure(format_percent(advice.skipped.value), "of the searches skipped"),
        KeyFigure(
            format_points(advice.difference.value or 0.0),
            f"points of accuracy{format_interval_text(advice.difference)}",
        ),
        KeyFigure(format_money(money, assumed), f"saved on {SAVINGS_QUESTIONS:,} questions"),
    ]
