"""CBDR's Tables 1 and 2 as one comparison: rerankers by sources of preference, and by answering LLMs and data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable
from knowgate.data.preferences import Preference, PreferenceFolder, load_common_settings
from knowgate.evaluation.rankers import (
    NO_PASSAGES,
    ORACLE,
    PASSAGE_COUNTS,
    RETRIEVER,
    EstimateTable,
    PassageMeanRanker,
    Ranker,
    RankerMeasures,
    RankingResult,
    ShortestFirstRanker,
    measure_answers,
    measure_ranking,
    rank_with_all,
    select_usable,
)
from knowgate.evaluation.reranker_cache import CachedAnswerer
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.formats import format_percent_estimate, format_points_estimate
from knowgate.types import Reranker


@dataclass(frozen=True)
class HeldOutPreferences:
    """Preferences of one source: the rows of each data set to measure on, and those rerankers learnt from."""

    name: str
    model_fingerprint: str
    by_data: Mapping[str, list[Preference]] = field(repr=False)
    learnt: list[Preference] = field(repr=False)

    @property
    def rows(self) -> list[Preference]:
        return select_usable([row for rows in self.by_data.values() for row in rows])


@dataclass(frozen=True)
class RerankerComparison:
    """rankings: by source. answers: by LLM and data set. seen: share of candidates the control knew, by source."""

    rankings: dict[str, RankingResult]
    answers: dict[tuple[str, str], RankerMeasures]
    seen: dict[str, float] = field(default_factory=dict)


def is_reranker(name: str) -> bool:
    """Neither a control, nor an order that needs no reranker."""
    others = (RETRIEVER, ORACLE, NO_PASSAGES, ShortestFirstRanker.name, PassageMeanRanker.name)
    return name not in others and not name.startswith(f"{ORACLE},")


def group_held_out_preferences(
    folders: Iterable[PreferenceFolder], split: str, limit: int | None = None
) -> list[HeldOutPreferences]:
    """The folders put together by source (and the length candidates were cut to), in the order given.

    limit: only the first so many questions of each data set.
    """
    by_source: dict[str, list[PreferenceFolder]] = {}
    for folder in folders:
        by_source.setdefault(_source(folder), []).append(folder)
    return [_held(name, some, split, limit) for name, some in by_source.items()]


def _source(folder: PreferenceFolder) -> str:
    settings = folder.manifest()["settings"]
    cut = f", cut to {settings['cut_to']} tokens" if settings.get("cut_to") else ""
    return f"{settings['source']}{cut}"


def _held(name: str, folders: Sequence[PreferenceFolder], split: str, limit: int | None) -> HeldOutPreferences:
    shared = load_common_settings(folders)
    by_data: dict[str, list[Preference]] = {}
    learnt: list[Preference] = []
    for folder in folders:
        rows = list(folder.rows())
        learnt += [row for row in rows if row.split == "train" and row.error is None]
        if own := [row for row in rows if row.split == split]:
            by_data.setdefault(str(folder.manifest()["settings"]["data"]), []).extend(own)
    return HeldOutPreferences(
        name, str(shared["model_fingerprint"]), {data: rows[:limit] for data, rows in by_data.items()}, learnt
    )


def compare_rerankers(
    sets: Sequence[HeldOutPreferences],
    rerankers: Mapping[str, Reranker],
    *,
    answering: Mapping[str, CachedAnswerer] | None = None,
    controls: bool = False,
    shown: Sequence[int] = PASSAGE_COUNTS,
    margin: float | None = None,
    say: Callable[[str], None] = lambda word: None,
) -> RerankerComparison:
    """Every reranker against every source's preferences; LLMs answer with the first passages of the first source's
    questions, whichever way they were ordered."""
    rankings: dict[str, RankingResult] = {}
    seen: dict[str, float] = {}
    for held in sets:
        means = PassageMeanRanker(held.learnt)
        own: dict[str, Reranker] = {
            **rerankers,
            **({"shortest first": ShortestFirstRanker(), means.name: means} if controls else {}),
        }
        rankings[held.name] = measure_ranking(held.rows, rank_with_all(held.rows, own, margin, say), margin)
        seen |= {held.name: means.seen(held.rows)} if controls else {}
    answers = {
        (llm, data): _answered(data, sets, rerankers, one, controls, shown, say)
        for llm, one in (answering or {}).items()
        for data in sets[0].by_data
    }
    return RerankerComparison(rankings, answers, seen)


def _answered(
    data: str,
    sets: Sequence[HeldOutPreferences],
    rerankers: Mapping[str, Reranker],
    answering: CachedAnswerer,
    controls: bool,
    shown: Sequence[int],
    say: Callable[[str], None],
) -> RankerMeasures:
    rows = select_usable(sets[0].by_data[data])
    own = {**rerankers, **({"shortest first": ShortestFirstRanker()} if controls else {})}
    rankers = [ranker for ranker in rank_with_all(rows, own) if ranker.name != ORACLE]
    return measure_answers(rows, [*rankers, *build_oracle_rankers(rows, sets)], answering, shown, say)


def build_oracle_rankers(rows: Sequence[Preference], sets: Sequence[HeldOutPreferences]) -> list[Ranker]:
    """The order of each source's own shifts, where it measured the same candidates: how good the signal itself is."""
    found = []
    for held in sets:
        shifts = {(row.id, one.id, one.text): one.shift for row in held.rows for one in row.candidates}
        wanted = [[(row.id, one.id, one.text) for one in row.candidates] for row in rows]
        if all(key in shifts for keys in wanted for key in keys):
            found.append(Ranker(f"{ORACLE}, {held.name}", [[shifts[key] for key in keys] for keys in wanted]))
    return found


def build_reranker_tables(found: RerankerComparison) -> list[TextTable]:
    """Table 1 for each source, Table 2 for all LLMs, each with the paired differences to the base."""
    sheets = [sheet for source, ranking in found.rankings.items() for sheet in _ranking_sheets(source, ranking)]
    return sheets + (_answer_sheets(found) if found.answers else [])


def _ranking_sheets(source: str, ranking: RankingResult) -> list[TextTable]:
    measured = ranking.measured
    about = f"preferences by {source}, {len(measured.ids)} questions with passages of both kinds"
    values, less = measured.means, measured.differences[measured.reference]
    title = f"Rankers: {about}; a random order has P@1 {ranking.chance:.3f}"
    if ranking.margin is not None and ranking.margin_share is not None:
        title += f"; the margin {ranking.margin:g} skips {ranking.margin_share:.1%}"
    return [
        _sheet(title, measured.rankers, values, format_percent_estimate),
        _sheet(f"Less {measured.reference}, in points: {about}", measured.rankers, less, format_points_estimate),
    ]


def _sheet(title: str, rankers: list[str], values: EstimateTable, show: Callable[[Estimate], str]) -> TextTable:
    rows = tuple(
        (name, *(show(by_ranker[name]) if name in by_ranker else MISSING_VALUE for by_ranker in values.values()))
        for name in rankers
        if any(name in by_ranker for by_ranker in values.values())
    )
    return TextTable(title, ("ranker", *values), rows)


def _answer_sheets(found: RerankerComparison) -> list[TextTable]:
    """Rows: LLM and ranker; columns: data set and how many passages."""
    asked = {data: len(measured.ids) for (_, data), measured in found.answers.items()}
    about = ", ".join(f"{data} ({n} questions)" for data, n in asked.items())
    reference = next(iter(found.answers.values())).reference
    return [
        _answer_sheet(f"Right answers: {about}", found, lambda one: one.means, format_percent_estimate),
        _answer_sheet(
            f"Right answers less those of {reference}, in points",
            found,
            lambda one: one.differences[reference],
            format_points_estimate,
        ),
    ]


def _answer_sheet(
    title: str,
    found: RerankerComparison,
    work_out: Callable[[RankerMeasures], EstimateTable],
    show: Callable[[Estimate], str],
) -> TextTable:
    worked = {key: work_out(measured) for key, measured in found.answers.items()}
    llms = list(dict.fromkeys(llm for llm, _ in worked))
    columns = list(dict.fromkeys((data, top) for (_, data), values in worked.items() for top in values))
    rows = []
    for llm in llms:
        rankers = dict.fromkeys(name for key, one in found.answers.items() if key[0] == llm for name in one.rankers)
        for name in rankers:
            cells = [worked.get((llm, data), {}).get(top, {}).get(name) for data, top in columns]
            if any(cell is not None for cell in cells):
                rows.append((llm, name, *(MISSING_VALUE if cell is None else show(cell) for cell in cells)))
    return TextTable(title, ("LLM", "ranker", *(f"{data}, {top}" for data, top in columns)), tuple(rows))


# --- to keep --------------------------------------------------------------------------------------


def reranker_comparison_to_dict(found: RerankerComparison) -> dict[str, Any]:
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


def _measured_json(measured: RankerMeasures) -> dict[str, Any]:
    return {
        "values": _plain(measured.means),
        "less": {other: _plain(values) for other, values in measured.differences.items()},
    }


def _plain(values: EstimateTable) -> dict[str, dict[str, Any]]:
    return {measure: {name: asdict(one) for name, one in found.items()} for measure, found in values.items()}


def iter_prediction_lines(found: RerankerComparison) -> Iterator[str]:
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
