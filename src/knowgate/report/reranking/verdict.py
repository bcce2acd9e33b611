"""Which reranker to use, in words. Ranking says whether passages that help come first, answers whether it matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from knowgate.display import percent, points
from knowgate.evaluation import RETRIEVER, Measured, RerankComparison, is_reranker
from knowgate.statistics import Estimate

FIRST = "P@1"
LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}


@dataclass(frozen=True)
class RerankVerdict:
    """light: as on every report. best: the reranker it speaks of, None where none was compared."""

    light: Literal["use", "try", "leave", "unknown"]
    headline: str
    sentences: list[str]
    best: str | None = None

    @property
    def label(self) -> str:
        return LABELS[self.light]


def rerank_verdict(found: RerankComparison) -> RerankVerdict:
    """By the preferences of the first source, and by the answers where LLMs gave any."""
    measured = next(iter(found.rankings.values())).measured
    means = measured.means[FIRST]
    rerankers = [name for name in measured.rankers if is_reranker(name)]
    if not rerankers:
        return RerankVerdict("unknown", "No reranker was compared with the retriever's order.", [])
    best = max(rerankers, key=lambda name: means[name].value or 0.0)
    gain = measured.differences[RETRIEVER][FIRST][best]
    answers = _answers(found, best)
    light = _light(gain, [one.difference for one in answers])
    told = [_ranks(measured, best, gain), *(_answered(one) for one in answers)]
    told += [] if answers else ["No LLM answered with these passages: --model shows whether answers get better."]
    told += [f"It is the best of {len(rerankers)} by {FIRST} on these questions."] if len(rerankers) > 1 else []
    return RerankVerdict(light, _headline(light, best), told, best)


@dataclass(frozen=True)
class _Answers:
    llm: str
    data: str
    shown: str
    difference: Estimate


def _answers(found: RerankComparison, best: str) -> list[_Answers]:
    """Right answers with the best reranker's passages less those with the retriever's, at the fewest passages shown."""
    told = []
    for (llm, data), measured in found.answers.items():
        shown = next(iter(measured.values))
        told.append(_Answers(llm, data, shown, measured.differences[RETRIEVER][shown][best]))
    return told


def _light(gain: Estimate, answers: list[Estimate]) -> Literal["use", "try", "leave"]:
    if gain.value is None or gain.value <= 0 or any(one.high is not None and one.high < 0 for one in answers):
        return "leave"
    shown = [one for one in (answers or [gain]) if one.low is not None and one.low > 0]
    return "use" if answers and len(shown) == len(answers) else "try"


def _headline(light: str, best: str) -> str:
    if light == "leave":
        return "Leave the retriever's order as it is."
    return f"Use '{best}'." if light == "use" else f"Try '{best}': that answers get better is not shown yet."


def _ranks(measured: Measured, best: str, gain: Estimate) -> str:
    means = measured.means[FIRST]
    return (
        f"On {len(measured.ids):,} held-out questions '{best}' puts a passage that helps first for "
        f"{percent(means[best].value)}, the retriever for {percent(means[RETRIEVER].value)}: {_difference(gain)}."
    )


def _answered(one: _Answers) -> str:
    return f"Answers of {one.llm} to {one.data} with the {one.shown} passages: {_difference(one.difference)}."


def _difference(found: Estimate) -> str:
    if found.value is None:
        return "not measured"
    if found.low is None or found.high is None:
        return f"{points(found.value)} points"
    return f"{points(found.value)} points (95 % interval {points(found.low)} to {points(found.high)})"
