"""Report of a comparison of rerankers: verdict and page.

Ranking measures say whether helpful passages come first; answers say whether that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from knowgate.core.display import format_percent, format_points
from knowgate.core.files import write_text
from knowgate.evaluation.rankers import RETRIEVER, RankerMeasures
from knowgate.evaluation.report import html
from knowgate.evaluation.report.evaluation_verdict import LEVEL_LABELS, format_interval
from knowgate.evaluation.reranker_comparison import RerankerComparison, build_reranker_tables, is_reranker
from knowgate.stats.bootstrap import Estimate

MAIN_MEASURE = "P@1"
RERANKER_DEFINITIONS = html.load_texts("reranker")


@dataclass(frozen=True)
class RerankerVerdict:
    """Whether to use a reranker.

    Attributes:
        level: 'use', 'try', 'leave' (keep the retriever's order) or 'unknown' (nothing was compared).
        headline: The advice in one sentence.
        sentences: The measurements behind it.
        best: The best reranker; None if none was compared.
    """

    level: Literal["use", "try", "leave", "unknown"]
    headline: str
    sentences: list[str]
    best: str | None = None


def build_reranker_verdict(comparison: RerankerComparison) -> RerankerVerdict:
    """Judge whether the best reranker is worth using. Ranking quality and LLM answers count."""
    measures = comparison.main_measures
    means = measures.means[MAIN_MEASURE]
    # A reranker that is sometimes skipped (with a margin) is only ranked: no LLM answers with its passages.
    answered = [set(answers.rankers) for answers in comparison.answers.values()]  # rankers, by LLM and data set
    rerankers = [name for name in measures.rankers if is_reranker(name) and all(name in names for names in answered)]
    if not rerankers:
        return RerankerVerdict("unknown", "No reranker was compared with the retriever's order.", [])
    best = max(rerankers, key=lambda name: means[name].value or 0.0)
    answer_changes = _describe_answer_changes(comparison, best)
    sentences = [_describe_ranking(measures, best), *answer_changes]
    if not answer_changes:
        sentences.append("No LLM answered with these passages: name one in `model` to see whether answers improve.")
    if len(rerankers) > 1:
        sentences.append(f"It is the best of {len(rerankers)} by {MAIN_MEASURE} on these questions.")
    gain = measures.differences[RETRIEVER][MAIN_MEASURE][best]
    level = _choose_level(gain, list(answer_changes.values()))
    headlines = {
        "use": f"Use '{best}'.",
        "try": f"Try '{best}': that answers get better is not shown yet.",
        "leave": "Leave the retriever's order as it is.",
    }
    return RerankerVerdict(level, headlines[level], sentences, best)


def _describe_ranking(measures: RankerMeasures, best: str) -> str:
    """Say how often the best reranker and the retriever rank a helpful passage first."""
    means = measures.means[MAIN_MEASURE]
    gain = measures.differences[RETRIEVER][MAIN_MEASURE][best]
    return (
        f"On {len(measures.ids):,} held-out questions '{best}' ranks a helpful passage first for "
        f"{format_percent(means[best].value)}, the retriever for {format_percent(means[RETRIEVER].value)}: "
        f"{_describe_difference(gain)}."
    )


def _describe_answer_changes(comparison: RerankerComparison, reranker: str) -> dict[str, Estimate]:
    """Return sentences about how a reranker changes the accuracy of each LLM, each with the change as its value."""
    changes = {}
    for (llm, data), answers in comparison.answers.items():
        fewest_passages = next(iter(answers.values))  # the first measure, such as 'top 1'
        change = answers.differences[RETRIEVER][fewest_passages][reranker]
        sentence = f"Answers of {llm} to {data} with the {fewest_passages} passages: {_describe_difference(change)}."
        changes[sentence] = change
    return changes


def _choose_level(gain: Estimate, answer_effects: list[Estimate]) -> Literal["use", "try", "leave"]:
    """Decide whether to use a reranker, to try it, or to leave it.

    'use' needs better answers of every LLM than with the retriever's order.

    Args:
        gain: Ranking measure of the reranker minus that of the retriever.
        answer_effects: Change of accuracy of each LLM, compared with the retriever's order; empty if none answered.
    """
    is_harmful = any(effect.high is not None and effect.high < 0 for effect in answer_effects)
    if gain.value is None or gain.value <= 0 or is_harmful:
        return "leave"
    improves_all = all(effect.low is not None and effect.low > 0 for effect in answer_effects)
    return "use" if answer_effects and improves_all else "try"


def _describe_difference(difference: Estimate) -> str:
    """Format a difference in points with its interval."""
    if difference.value is None:
        return "not measured"
    return f"{format_points(difference.value)} points{format_interval(difference)}"


# --- page -----------------------------------------------------------------------------------------


def write_reranker_page(comparison: RerankerComparison, out: Path) -> None:
    """Write the comparison of rerankers as one HTML file."""
    subtitle = f"preferences by {', '.join(comparison.rankings)}, {len(comparison.main_measures.ids):,} questions"
    write_text(out, html.render_page("Which reranker to use", subtitle, list(build_reranker_sections(comparison))))


def build_reranker_sections(comparison: RerankerComparison) -> Iterator[str]:
    """Build the sections of the HTML page that compares rerankers: the verdict, tables and definitions."""
    verdict = build_reranker_verdict(comparison)
    yield html.render_verdict(verdict.level, LEVEL_LABELS[verdict.level], verdict.headline, " ".join(verdict.sentences))
    tables = [html.render_table(table) for table in build_reranker_tables(comparison)]
    intro = "Shares with 95 % intervals, then paired differences."
    yield html.render_section("tables", "What reranking changes", intro, tables)
    definitions = html.render_definitions(RERANKER_DEFINITIONS)
    yield html.render_folded_section("how", "How every number is computed", "", [definitions])
