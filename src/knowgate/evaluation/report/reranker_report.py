"""Rerankers compared, as one HTML file: what to do, one picture, then the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from knowgate.core.display import format_percent, format_points
from knowgate.core.files import write_text
from knowgate.evaluation.rankers import NO_PASSAGES, RETRIEVER, RankerMeasures
from knowgate.evaluation.report import html as markup
from knowgate.evaluation.report.charts import DotRow, draw_dot_chart
from knowgate.evaluation.report.html import render_page
from knowgate.evaluation.reranker_comparison import RerankerComparison, build_reranker_tables, is_reranker
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.formats import format_points_estimate
from knowgate.types.markup import escape_html

MAIN_MEASURE = "P@1"
RERANKER_LABELS = {"use": "Worth using", "try": "Worth a try", "leave": "Not worth it", "unknown": "Cannot be said"}


@dataclass(frozen=True)
class RerankerVerdict:
    """light: as on every report. best: the reranker it speaks of, None where none was compared."""

    light: Literal["use", "try", "leave", "unknown"]
    headline: str
    sentences: list[str]
    best: str | None = None

    @property
    def label(self) -> str:
        return RERANKER_LABELS[self.light]


def build_reranker_verdict(found: RerankerComparison) -> RerankerVerdict:
    """By the preferences of the first source, and by the answers where LLMs gave any."""
    measured = next(iter(found.rankings.values())).measured
    means = measured.means[MAIN_MEASURE]
    rerankers = [name for name in measured.rankers if is_reranker(name)]
    if not rerankers:
        return RerankerVerdict("unknown", "No reranker was compared with the retriever's order.", [])
    best = max(rerankers, key=lambda name: means[name].value or 0.0)
    gain = measured.differences[RETRIEVER][MAIN_MEASURE][best]
    answers = _answers(found, best)
    light = _light(gain, [one.difference for one in answers])
    told = [_ranks(measured, best, gain), *(_answered(one) for one in answers)]
    told += [] if answers else ["No LLM answered with these passages: --model shows whether answers get better."]
    told += [f"It is the best of {len(rerankers)} by {MAIN_MEASURE} on these questions."] if len(rerankers) > 1 else []
    return RerankerVerdict(light, _headline(light, best), told, best)


@dataclass(frozen=True)
class _Answers:
    llm: str
    data: str
    shown: str
    difference: Estimate


def _answers(found: RerankerComparison, best: str) -> list[_Answers]:
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


def _ranks(measured: RankerMeasures, best: str, gain: Estimate) -> str:
    means = measured.means[MAIN_MEASURE]
    return (
        f"On {len(measured.ids):,} held-out questions '{best}' puts a passage that helps first for "
        f"{format_percent(means[best].value)}, the retriever for {format_percent(means[RETRIEVER].value)}: {_difference(gain)}."
    )


def _answered(one: _Answers) -> str:
    return f"Answers of {one.llm} to {one.data} with the {one.shown} passages: {_difference(one.difference)}."


def _difference(found: Estimate) -> str:
    if found.value is None:
        return "not measured"
    if found.low is None or found.high is None:
        return f"{format_points(found.value)} points"
    return (
        f"{format_points(found.value)} points (95 % interval {format_points(found.low)} to {format_points(found.high)})"
    )


RERANKER_DEFINITIONS = {
    "P@k": "share of the first k passages that help the LLM; P@1: whether the first one does",
    "R@k": "share of all passages that help which are among the first k",
    "MRR@k": "1 / rank of the first passage that helps, 0 if it is not among the first k",
    "helps": "the LLM's answer is likelier right with the passage than without, as `knowgate prefer` measured it",
    "retriever": "the order the passages were found in",
    "base": "the cross-encoder before alignment",
    "oracle": "ordered by what each passage really did: the ceiling, not a ranker",
    "top k": "share of right answers of an LLM that is shown the first k passages of a ranker",
    "intervals": "95 %, bootstrap over questions; differences are paired, question by question",
}


def write_reranker_page(found: RerankerComparison, out: Path) -> None:
    """Write the page, whole or not at all."""
    n = len(next(iter(found.rankings.values())).measured.ids)
    about = f"preferences by {', '.join(found.rankings)}, {n:,} questions"
    write_text(out, render_page("Which reranker to use", about, list(build_reranker_sections(found))))


def build_reranker_sections(found: RerankerComparison) -> Iterator[str]:
    said = build_reranker_verdict(found)
    words = f"<h2>{markup.render_text(said.headline)}</h2><p>{escape_html(' '.join(said.sentences))}</p>"
    yield f'<section class="verdict {said.light}" id="verdict"><p class="light">{said.label}</p>{words}</section>'
    yield _pictures(found)
    tables = [markup.render_table(sheet) for sheet in build_reranker_tables(found)]
    yield markup.render_folded_section(
        "tables", "All numbers", "Shares with 95 % intervals, then paired differences.", tables
    )
    yield markup.render_folded_section(
        "how", "How every number is computed", "", [markup.render_definitions("Definitions", RERANKER_DEFINITIONS)]
    )


def _pictures(found: RerankerComparison) -> str:
    intro = "Each ranker against the retriever's own order, on the same questions. Right of the line is better."
    drawn = [
        _picture(
            ranking.measured,
            MAIN_MEASURE,
            f"A passage that helps comes first ({MAIN_MEASURE}): preferences by {source}",
        )
        for source, ranking in found.rankings.items()
    ]
    drawn += [
        _picture(measured, shown, f"Right answers of {llm} to {data}, {shown}")
        for (llm, data), measured in found.answers.items()
        for shown in measured.values
    ]
    return markup.render_section(
        "picture", "What reranking changes", intro, [markup.render_pair([one for one in drawn if one])]
    )


def _picture(measured: RankerMeasures, measure: str, title: str) -> str:
    differences = measured.differences[RETRIEVER][measure]
    rows = [
        DotRow(name, one.value, one.low, one.high, f"{name}: {format_points_estimate(one)} points")
        for name, one in differences.items()
        if one.value is not None and name != NO_PASSAGES
    ]
    if not rows:
        return ""
    drawn = draw_dot_chart(rows, title, "; ".join(row.says for row in rows), "points against the retriever's order")
    return markup.render_figure(drawn, title)
