"""Why no gate is recommended, in words."""

from __future__ import annotations

from knowgate.display import percent, points
from knowgate.evaluation import FEWEST, WORTH, Evaluation, Recommendation
from knowgate.report.comparison.words import chance_words, interval_words, points_plain, threshold_words

LITTLE = 0.15  # share of questions the LLM knows, below which there is little to skip
BLUNT = 0.65  # AUROC below which a gate hardly tells anything


def no_headline(advice: Recommendation, evaluation: Evaluation) -> str:
    if evaluation.trial.open_right is None:
        return "What skipping would cost cannot be seen: no question was answered with passages."
    if advice.light == "unknown":
        shown = f"Fewer than {FEWEST} different questions cannot" if advice.n > 1 else "One question cannot"
        return f"{shown} show whether a gate pays here."
    return "No gate is worth using here: retrieve for every question."


def why_not(advice: Recommendation, evaluation: Evaluation) -> list[str]:
    trial = evaluation.trial
    if trial.open_right is None:
        ranked = _best(evaluation)
        return ["Label with passages to see it: knowgate label --index DIR.", *([ranked] if ranked else [])]
    if advice.light == "unknown":
        return [f"Label at least {FEWEST}; a few hundred are better. The tables are there, but prove little."]
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
    if (advice.tried.value or 0.0) >= WORTH and not advice.beats_chance:
        return (
            f"The LLM knows {percent(knows)} of these questions, but that gates choose better than chance which "
            "searches to skip is not shown."
        )
    return (
        f"The LLM knows {percent(knows)} of these questions, but {advice.n} do not show that a threshold chosen on "
        f"some of them keeps the loss within {points_plain(advice.max_loss)} on the others and skips enough: a curve "
        "that looks better may be luck, and more questions would tell."
    )


def _tried(advice: Recommendation) -> list[str]:
    if advice.gate is None:
        return []
    chance = f"; {chance_words(advice)}" if advice.gain.value is not None else ""
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
