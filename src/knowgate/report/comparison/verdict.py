"""What an evaluation comes to, in words: for a manager on the page, for everybody on the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from knowgate.display import percent, points
from knowgate.evaluation import (
    PER,
    ROUNDS,
    Assumed,
    Evaluation,
    Recommendation,
    Spending,
    recommend,
    spend_always,
    spend_gated,
    spend_never,
)
from knowgate.gates import far_words
from knowgate.report.comparison.reasons import no_headline, why_not
from knowgate.report.comparison.words import chance_words, interval_words, points_plain, threshold_words

LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}


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
    never: Spending
    note: str = ""

    @property
    def label(self) -> str:
        return LABELS[self.advice.light]

    @property
    def text(self) -> str:
        return " ".join([self.headline, *self.sentences])


def verdict(evaluation: Evaluation, assumed: Assumed, max_loss: float) -> Verdict:
    advice = recommend(evaluation, max_loss)
    always, never = spend_always(evaluation.trial), spend_never(evaluation.trial)
    gated = _spent(evaluation, advice) if advice.gate else always
    behind = _arbiter(evaluation, advice)
    if not advice.is_worth_it:
        reasons = [*why_not(advice, evaluation), *behind]
        reasons += [_costs(always, assumed)] if evaluation.trial.open_right is not None else []
        return Verdict(advice, no_headline(advice, evaluation), reasons, [], always, gated, never)
    told = [_skips(advice), *([advice.guarantee] if advice.guarantee else []), _measured(advice)]
    told += [*behind, *([far] if (far := _far(advice, evaluation)) else [])]
    return Verdict(
        advice, _headline(advice), [*told, _saves(always, gated, assumed)], _tiles(advice, always, gated, assumed),
        always, gated, never, "" if advice.guarantee else _aimed(advice, evaluation),
    )  # fmt: skip


def _far(advice: Recommendation, evaluation: Evaluation) -> str:
    """A warning where many questions are unlike those the gate was fitted on."""
    if advice.does_without:
        return ""
    gate = evaluation.gate(str(advice.gate))
    return far_words(gate.gate, gate.far, advice.n)


def _arbiter(evaluation: Evaluation, advice: Recommendation) -> list[str]:
    """What an arbiter behind the gate would add, where one was asked."""
    lines = {line.gate: line for line in evaluation.cascade.lines} if evaluation.cascade else {}
    line = lines.get(str(advice.gate) if advice.is_worth_it else "always") or lines.get("always")
    if evaluation.cascade is None or line is None:
        return []
    where = "after every search" if line.gate == "always" else f"behind '{line.gate}' at its own threshold"
    change = f"{points(line.against_always.value or 0.0)} points against always retrieving"
    return [f"The arbiter '{evaluation.cascade.arbiter}' {where}: {change}{interval_words(line.against_always)}."]


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


def _skips(advice: Recommendation) -> str:
    if advice.does_without:
        return "It saves every search."
    return f"It skips {percent(advice.skipped.value)} of the searches."


def _aimed(advice: Recommendation, evaluation: Evaluation) -> str:
    if not advice.agreed:
        return f"Nothing had to be chosen for that, so all questions speak for it. {_stored(evaluation)}."
    chosen = f"Gate and threshold were chosen here to lose no more than {points_plain(advice.max_loss)}"
    agreed = f"; {advice.agreed} of {ROUNDS} repeats without a fifth of the questions chose the same gate."
    return f"{chosen}{agreed} {_stored(evaluation, ': knowgate calibrate gives one')}."


def _stored(evaluation: Evaluation, advice: str = "") -> str:
    """Guarantees of the gates here, none of which is that of what is recommended."""
    if not evaluation.promises:
        on_record = any(gate.gate in evaluation.trial.recorded for gate in evaluation.gates)
        where = " (needs on record keep none, folders of gates do)" if on_record else ""
        return f"No guarantee is stored{where}{advice}"
    told = [f"with '{gate}': {promised.words}" for gate, promised in evaluation.promises.items()]
    return f"No guarantee is stored for that; one is {' One is '.join(told)}".rstrip(".")


def _measured(advice: Recommendation) -> str:
    where = (
        "on these questions"
        if advice.guarantee or not advice.agreed
        else f"on held-out questions ({percent(advice.tried.value)} skipped)"
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
    return f"but that it chooses better than chance is not certain: {chance_words(advice)}"


def _more(advice: Recommendation) -> str:
    """How many questions would rule it out, if the difference stayed what it is."""
    found = advice.difference
    room = (found.value or 0.0) + advice.max_loss
    if found.low is None or found.value is None or room <= 0:
        return ""
    needed = math.ceil(advice.n * ((found.value - found.low) / room) ** 2 / 100) * 100
    return f": about {needed:,} questions would show it" if needed < 50_000 else ""


def _saves(always: Spending, gated: Spending, assumed: Assumed) -> str:
    searches = PER * (always.searches - gated.searches)
    money = PER * (always.money(assumed) - gated.money(assumed))
    result = f"saves {searches:,.0f} searches and {money_words(money, assumed)}"
    if money < 0:
        result = f"saves {searches:,.0f} searches but costs {money_words(-money, assumed)} more, for its drafts"
    return f"On {PER:,} questions that {result}, at {_prices(assumed)}."


def _costs(always: Spending, assumed: Assumed) -> str:
    """What is at stake where nothing is recommended."""
    money = money_words(PER * always.money(assumed), assumed)
    return f"Looking up {PER:,} such questions costs {money}, at {_prices(assumed)}; no gate can save more."


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
