"""What an evaluation comes to, in words: for a manager on the page, for everybody on the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from knowgate.display import NOTHING, percent, points
from knowgate.evaluation import (
    FEWEST,
    PER,
    ROUNDS,
    WORTH,
    Assumed,
    Evaluation,
    Recommendation,
    Spending,
    recommend,
    spend_always,
    spend_gated,
)
from knowgate.gates import far_words
from knowgate.statistics import Estimate

LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}
LITTLE = 0.15  # share of questions the LLM knows, below which there is little to skip
BLUNT = 0.65  # AUROC below which a gate hardly tells anything


@dataclass(frozen=True)
class Tile:
    """A figure that stands out, and what it is."""

    value: str
    about: str


@dataclass(frozen=True)
class Verdict:
    """headline: what to do; sentences: why, and how sure. note: how it was chosen."""

    advice: Recommendation
    headline: str
    sentences: list[str]
    tiles: list[Tile]
    always: Spending
    gated: Spending
    note: str = ""

    @property
    def label(self) -> str:
        return LABELS[self.advice.light]

    @property
    def text(self) -> str:
        return " ".join([self.headline, *self.sentences])


def verdict(evaluation: Evaluation, assumed: Assumed, max_loss: float) -> Verdict:
    advice = recommend(evaluation, max_loss)
    always = spend_always(evaluation.trial)
    gated = _spent(evaluation, advice) if advice.gate else always
    if not advice.is_worth_it:
        return Verdict(advice, _no_headline(advice, evaluation), _reasons(advice, evaluation), [], always, gated)
    told = [_skips(advice), *([advice.guarantee] if advice.guarantee else []), _measured(advice)]
    told += [far] if (far := _far(advice, evaluation)) else []
    return Verdict(
        advice, _headline(advice), [*told, _saves(always, gated, assumed)], _tiles(advice, always, gated, assumed),
        always, gated, "" if advice.guarantee else _aimed(advice),
    )  # fmt: skip


def _far(advice: Recommendation, evaluation: Evaluation) -> str:
    """A warning where many questions are unlike those the gate was fitted on."""
    if advice.does_without:
        return ""
    gate = evaluation.gate(str(advice.gate))
    return far_words(gate.gate, gate.far, advice.n)


def _spent(evaluation: Evaluation, advice: Recommendation) -> Spending:
    gate = None if advice.does_without else evaluation.gate(str(advice.gate))
    return spend_gated(evaluation.trial, advice.skips, gate)


# --- yes ------------------------------------------------------------------------------------------


def _headline(advice: Recommendation) -> str:
    if advice.does_without:
        sure = "Do without retrieval here." if advice.light == "use" else "Retrieval hardly pays here: try without."
        return f"{sure} No gate is needed for that."
    verb = "Use" if advice.light == "use" else "Try"
    return f"{verb} '{advice.gate}' at {threshold_words(advice.threshold)}."


def threshold_words(threshold: float | None) -> str:
    return NOTHING if threshold is None else f"{threshold:.3g}"


def _skips(advice: Recommendation) -> str:
    if advice.does_without:
        return "It saves every search."
    return f"It skips {percent(advice.skipped.value)} of the searches."


def _aimed(advice: Recommendation) -> str:
    chosen = f"Gate and threshold were chosen here to lose no more than {points_plain(advice.max_loss)}"
    agreed = f"; {advice.agreed} of {ROUNDS} repeats without a fifth of the questions chose the same gate."
    return f"{chosen}{agreed} No guarantee is stored: knowgate calibrate gives one."


def _measured(advice: Recommendation) -> str:
    where = (
        "on these questions" if advice.guarantee else f"on held-out questions ({percent(advice.tried.value)} skipped)"
    )
    said = f"Measured {where}: {points(advice.difference.value or 0.0)} points of accuracy against always retrieving"
    said += interval_words(advice.difference)
    if advice.light == "use":
        return f"{said}."
    return f"{said}, {_doubt(advice)}."


def _doubt(advice: Recommendation) -> str:
    """What keeps it from being shown."""
    found = advice.difference
    if found.low is None or found.low < -advice.max_loss:
        return f"so a loss above {points_plain(advice.max_loss)} is not ruled out{_more(advice)}"
    return f"but that it chooses better than chance is not shown: {_chance(advice)}"


def _chance(advice: Recommendation) -> str:
    gain = f"{points(advice.gain.value or 0.0)} points{interval_words(advice.gain)}"
    return f"against as many skips at random it gains {gain}"


def _more(advice: Recommendation) -> str:
    """How many questions would rule it out, if the difference stayed what it is."""
    found = advice.difference
    room = (found.value or 0.0) + advice.max_loss
    if found.low is None or found.value is None or room <= 0:
        return ""
    needed = math.ceil(advice.n * ((found.value - found.low) / room) ** 2 / 100) * 100
    return f": about {needed:,} questions would show it" if needed < 50_000 else ""


def interval_words(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {points(found.low)} to {points(found.high)})"


def points_plain(share: float) -> str:
    return f"{100 * share:g} points" if share != 0.01 else "1 point"


def _saves(always: Spending, gated: Spending, assumed: Assumed) -> str:
    searches = PER * (always.searches - gated.searches)
    money = PER * (always.money(assumed) - gated.money(assumed))
    result = f"saves {searches:,.0f} searches and {money_words(money, assumed)}"
    if money < 0:
        result = f"saves {searches:,.0f} searches but costs {money_words(-money, assumed)} more, for its drafts"
    return f"On {PER:,} questions that {result}, at {_prices(assumed)}."


def _prices(assumed: Assumed) -> str:
    whose = "prices assumed here" if assumed == Assumed() else "your prices"
    return f"{whose} ({assumed.price_search:g} a search, {1e6 * assumed.price_token:g} a million tokens)"


def money_words(amount: float, assumed: Assumed) -> str:
    """Assumed prices are in dollars; given ones in whatever they were given in."""
    digits = f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"
    return f"${digits}" if assumed == Assumed() else digits


def _tiles(advice: Recommendation, always: Spending, gated: Spending, assumed: Assumed) -> list[Tile]:
    money = PER * (always.money(assumed) - gated.money(assumed))
    return [
        Tile(percent(advice.skipped.value), "of the searches skipped"),
        Tile(points(advice.difference.value or 0.0), f"points of accuracy{interval_words(advice.difference)}"),
        Tile(money_words(money, assumed), f"saved on {PER:,} questions"),
    ]


# --- no -------------------------------------------------------------------------------------------


def _no_headline(advice: Recommendation, evaluation: Evaluation) -> str:
    if evaluation.trial.open_right is None:
        return "What skipping would cost cannot be seen: no question was answered with passages."
    if advice.light == "unknown":
        shown = f"Fewer than {FEWEST} different questions cannot" if advice.n > 1 else "One question cannot"
        return f"{shown} show whether a gate pays here."
    return "No gate is worth using here: retrieve for every question."


def _reasons(advice: Recommendation, evaluation: Evaluation) -> list[str]:
    trial = evaluation.trial
    if trial.open_right is None:
        ranked = _best(evaluation)
        return ["Label with passages to see it: knowgate label --index DIR.", *([ranked] if ranked else [])]
    if advice.light == "unknown":
        return [f"Label at least {FEWEST}; a few hundred are better. The tables below are there, but prove little."]
    return [_why(advice, evaluation), *_tried(advice)]


def _why(advice: Recommendation, evaluation: Evaluation) -> str:
    trial = evaluation.trial
    knows = float(trial.closed_right.mean())
    if knows < LITTLE:
        return (
            f"The LLM answers only {percent(knows)} of these questions right without passages, so there is little to "
            "skip."
        )
    aurocs = [gate.measures["auroc"].value or 0.0 for gate in evaluation.gates if "auroc" in gate.measures]
    if not aurocs:
        return "No gate was evaluated that tells questions apart."
    if max(aurocs) < BLUNT:
        return (
            f"The LLM knows {percent(knows)} of these questions, but no gate tells which: the best AUROC is "
            f"{max(aurocs):.2f}."
        )
    if (advice.tried.value or 0.0) >= WORTH and (advice.gain.low or 0.0) <= 0:
        return (
            f"The LLM knows {percent(knows)} of these questions, but that gates choose better than chance which "
            "searches to skip is not shown."
        )
    return (
        f"The LLM knows {percent(knows)} of these questions, but no threshold of a gate keeps the loss within "
        f"{points_plain(advice.max_loss)} and skips enough."
    )


def _tried(advice: Recommendation) -> list[str]:
    if advice.gate is None:
        return []
    chance = f"; {_chance(advice)}" if advice.gain.value is not None else ""
    return [
        f"The best found, '{advice.gate}' at {threshold_words(advice.threshold)}, skips {percent(advice.tried.value)} "
        f"on held-out questions, at {points(advice.difference.value or 0.0)} points against always "
        f"retrieving{interval_words(advice.difference)}{chance}."
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
        f"{best.measures['auroc'].shown(2)}."
    )
