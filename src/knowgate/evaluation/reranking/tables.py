"""A comparison of rerankers as tables, as JSON, and as predictions small enough to keep. Measures nothing anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from knowgate.display import NOTHING, Sheet, points_with_interval, share_with_interval
from knowgate.evaluation.reranking.compare import RerankComparison
from knowgate.evaluation.reranking.rankers import Estimates, Measured, Ranking
from knowgate.statistics import Estimate


def rerank_sheets(found: RerankComparison) -> list[Sheet]:
    """Table 1 for each source, Table 2 for all LLMs, each with the paired differences to the base."""
    sheets = [sheet for source, ranking in found.rankings.items() for sheet in _ranking_sheets(source, ranking)]
    return sheets + (_answer_sheets(found) if found.answers else [])


def _ranking_sheets(source: str, ranking: Ranking) -> list[Sheet]:
    measured = ranking.measured
    about = f"preferences by {source}, {len(measured.ids)} questions with passages of both kinds"
    values, less = measured.means, measured.differences[measured.reference]
    title = f"Rankers: {about}; a random order has P@1 {ranking.chance:.3f}"
    if ranking.margin is not None and ranking.margin_share is not None:
        title += f"; the margin {ranking.margin:g} skips {ranking.margin_share:.1%}"
    return [
        _sheet(title, measured.rankers, values, share_with_interval),
        _sheet(f"Less {measured.reference}, in points: {about}", measured.rankers, less, points_with_interval),
    ]


def _sheet(title: str, rankers: list[str], values: Estimates, show: Callable[[Estimate], str]) -> Sheet:
    rows = tuple(
        (name, *(show(by_ranker[name]) if name in by_ranker else NOTHING for by_ranker in values.values()))
        for name in rankers
        if any(name in by_ranker for by_ranker in values.values())
    )
    return Sheet(title, ("ranker", *values), rows)


def _answer_sheets(found: RerankComparison) -> list[Sheet]:
    """Rows: LLM and ranker; columns: data set and how many passages."""
    asked = {data: len(measured.ids) for (_, data), measured in found.answers.items()}
    about = ", ".join(f"{data} ({n} questions)" for data, n in asked.items())
    reference = next(iter(found.answers.values())).reference
    return [
        _answer_sheet(f"Right answers: {about}", found, lambda one: one.means, share_with_interval),
        _answer_sheet(
            f"Right answers less those of {reference}, in points",
            found,
            lambda one: one.differences[reference],
            points_with_interval,
        ),
    ]


def _answer_sheet(
    title: str,
    found: RerankComparison,
    work_out: Callable[[Measured], Estimates],
    show: Callable[[Estimate], str],
) -> Sheet:
    worked = {key: work_out(measured) for key, measured in found.answers.items()}
    llms = list(dict.fromkeys(llm for llm, _ in worked))
    columns = list(dict.fromkeys((data, top) for (_, data), values in worked.items() for top in values))
    rows = []
    for llm in llms:
        rankers = dict.fromkeys(name for key, one in found.answers.items() if key[0] == llm for name in one.rankers)
        for name in rankers:
            cells = [worked.get((llm, data), {}).get(top, {}).get(name) for data, top in columns]
            if any(cell is not None for cell in cells):
                rows.append((llm, name, *(NOTHING if cell is None else show(cell) for cell in cells)))
    return Sheet(title, ("LLM", "ranker", *(f"{data}, {top}" for data, top in columns)), tuple(rows))


# --- to keep --------------------------------------------------------------------------------------


def rerank_json(found: RerankComparison) -> dict[str, Any]:
    """Every value with its interval, and the paired differences to the base and to the retriever's order."""
    return {
        "rankings": {
            source: {
                "questions": len(ranking.measured.ids),
                "chance": ranking.chance,
                "margin": ranking.margin,
                "margin_share": ranking.margin_share,
                "seen_by_passage_means": found.seen.get(source),
                **_measured_json(ranking.measured),
            }
            for source, ranking in found.rankings.items()
        },
        "answers": [
            {"model": llm, "data": data, "questions": len(measured.ids), **_measured_json(measured)}
            for (llm, data), measured in found.answers.items()
        ],
    }


def _measured_json(measured: Measured) -> dict[str, Any]:
    return {
        "values": _plain(measured.means),
        "less": {other: _plain(values) for other, values in measured.differences.items()},
    }


def _plain(values: Estimates) -> dict[str, dict[str, Any]]:
    return {measure: {name: asdict(one) for name, one in found.items()} for measure, found in values.items()}


def prediction_lines(found: RerankComparison) -> Iterator[str]:
    """What each ranker and each LLM did, question by question, without questions and passages: one line each."""
    for source, ranking in found.rankings.items():
        for name, hits in ranking.hits.items():
            places = ["".join("01"[hit] for hit in row) for row in hits]
            by_id = dict(zip(ranking.measured.ids, places, strict=True))
            yield json.dumps({"preferences": source, "ranker": name, "hits": by_id}) + "\n"
    for (llm, data), measured in found.answers.items():
        for top, by_ranker in measured.values.items():
            for name, numbers in by_ranker.items():
                verdicts = [None if np.isnan(one) else int(one) for one in numbers]
                right = dict(zip(measured.ids, verdicts, strict=True))
                yield json.dumps({"model": llm, "data": data, "shown": top, "ranker": name, "right": right}) + "\n"
