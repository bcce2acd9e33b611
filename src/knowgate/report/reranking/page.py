"""Rerankers compared, as one HTML file: what to do, one picture, then the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from knowgate.display import points_with_interval
from knowgate.evaluation import BARE, RETRIEVER, Measured, RerankComparison, rerank_sheets
from knowgate.files import write_text
from knowgate.markup import escape
from knowgate.report import markup
from knowgate.report.bars import Row, dot_rows
from knowgate.report.page import whole_page
from knowgate.report.reranking.verdict import FIRST, rerank_verdict

HOW = {
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


def write_rerank_page(found: RerankComparison, out: Path) -> None:
    """Write the page, whole or not at all."""
    n = len(next(iter(found.rankings.values())).measured.ids)
    about = f"preferences by {', '.join(found.rankings)}, {n:,} questions"
    write_text(out, whole_page("Which reranker to use", about, list(sections(found))))


def sections(found: RerankComparison) -> Iterator[str]:
    said = rerank_verdict(found)
    words = f"<h2>{markup.text(said.headline)}</h2><p>{escape(' '.join(said.sentences))}</p>"
    yield f'<section class="verdict {said.light}" id="verdict"><p class="light">{said.label}</p>{words}</section>'
    yield _pictures(found)
    tables = [markup.table(sheet) for sheet in rerank_sheets(found)]
    yield markup.folded("tables", "All numbers", "Shares with 95 % intervals, then paired differences.", tables)
    yield markup.folded("how", "How every number is computed", "", [markup.definitions("Definitions", HOW)])


def _pictures(found: RerankComparison) -> str:
    intro = "Each ranker against the retriever's own order, on the same questions. Right of the line is better."
    drawn = [
        _picture(ranking.measured, FIRST, f"A passage that helps comes first ({FIRST}): preferences by {source}")
        for source, ranking in found.rankings.items()
    ]
    drawn += [
        _picture(measured, shown, f"Right answers of {llm} to {data}, {shown}")
        for (llm, data), measured in found.answers.items()
        for shown in measured.values
    ]
    return markup.section("picture", "What reranking changes", intro, [markup.pair([one for one in drawn if one])])


def _picture(measured: Measured, measure: str, title: str) -> str:
    differences = measured.differences[RETRIEVER][measure]
    rows = [
        Row(name, one.value, one.low, one.high, f"{name}: {points_with_interval(one)} points")
        for name, one in differences.items()
        if one.value is not None and name != BARE
    ]
    if not rows:
        return ""
    drawn = dot_rows(rows, title, "; ".join(row.says for row in rows), "points against the retriever's order")
    return markup.figure(drawn, title)
