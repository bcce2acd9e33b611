"""Comparison of rerankers (CBDR, Tables 1 and 2).

Rerankers are measured by preferences (whether passages that help the LLM come first), and by the accuracy of LLMs that
are shown their first passages. A source is the method by which preferences were measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from knowgate.core.display import TextTable
from knowgate.data.preferences import Preference, PreferenceFolder, load_common_settings
from knowgate.evaluation import rankers as ranking
from knowgate.evaluation.rankers import NO_PASSAGES, ORACLE, RETRIEVER, EstimateTable, RankerMeasures, RankingResult
from knowgate.evaluation.reranker_cache import CachedAnswerer
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import format_percent_estimate, format_points_estimate
from knowgate.types import Reranker


@dataclass(frozen=True)
class HeldOutPreferences:
    """Preferences of an LLM: how much each candidate passage helps it answer.

    Attributes:
        name: Name of the source: the method by which the preferences were measured.
        model_fingerprint: Fingerprint of the LLM whose preferences were measured.
        by_data: Held-out questions, on which rerankers are compared, by data set.
        training: Questions that rerankers were trained on.
    """

    name: str
    model_fingerprint: str
    by_data: Mapping[str, list[Preference]] = field(repr=False)
    training: list[Preference] = field(repr=False)

    @property
    def rows(self) -> list[Preference]:
        """The held-out rows that did not fail and have candidate passages."""
        return ranking.select_usable([row for rows in self.by_data.values() for row in rows])


@dataclass(frozen=True)
class RerankerComparison:
    """Rerankers compared by the rank of helpful passages and by LLM answers.

    Attributes:
        rankings: How early each reranker puts helpful passages. The keys are the methods by which it was measured which
            passages help.
        answers: Accuracy of the LLMs' answers with the first passages of each reranker. The keys are (LLM, data set).
    """

    rankings: dict[str, RankingResult]
    answers: dict[tuple[str, str], RankerMeasures]

    @property
    def main_measures(self) -> RankerMeasures:
        """The ranking measures by the first method of measuring which passages help."""
        return next(iter(self.rankings.values())).measures


def is_reranker(name: str) -> bool:
    """Return whether a name belongs to a reranker.

    Retriever, baselines and oracles (perfect orders) are not rerankers.
    """
    others = (RETRIEVER, ORACLE, NO_PASSAGES, ranking.ShortestFirstRanker.name, ranking.PassageMeanRanker.name)
    return name not in others and not name.startswith(f"{ORACLE}, ")  # the name of a source follows the comma


def group_held_out_preferences(
    folders: Iterable[PreferenceFolder], split: str, limit: int | None = None
) -> list[HeldOutPreferences]:
    """Read preference folders, and group them by the method of measuring which passages help an LLM.

    If passages were cut to a maximum length, each length counts as a method of its own.

    Args:
        folders: Preference folders.
        split: The split of the questions to compare rerankers on, such as 'test'.
        limit: Maximum number of questions per data set.
    """
    by_method: dict[str, list[PreferenceFolder]] = {}
    for folder in folders:
        settings = folder.manifest()["settings"]
        cut = f", cut to {settings['cut_to']} tokens" if settings.get("cut_to") else ""
        by_method.setdefault(f"{settings['source']}{cut}", []).append(folder)
    return [_read_held_out(name, group, split, limit) for name, group in by_method.items()]


def _read_held_out(name: str, folders: Sequence[PreferenceFolder], split: str, limit: int | None) -> HeldOutPreferences:
    """Read the held-out and training questions of one source from its folders.

    Args:
        name: Name of the source, the method by which preferences were measured.
        folders: Its folders.
        split: The split of the held-out questions, such as 'test'.
        limit: Maximum number of held-out questions per data set.
    """
    by_data: dict[str, list[Preference]] = {}
    training: list[Preference] = []
    for folder in folders:
        rows = list(folder.rows())
        training += [row for row in rows if row.split == "train" and row.error is None]
        held_out = [row for row in rows if row.split == split]
        if held_out:
            by_data.setdefault(str(folder.manifest()["settings"]["data"]), []).extend(held_out)
    fingerprint = str(load_common_settings(folders)["model_fingerprint"])
    return HeldOutPreferences(name, fingerprint, {data: rows[:limit] for data, rows in by_data.items()}, training)


def compare_rerankers(
    sources: Sequence[HeldOutPreferences],
    rerankers: Mapping[str, Reranker],
    answerers: Mapping[str, CachedAnswerer] | None = None,
    *,
    controls: bool = False,
    passage_counts: Sequence[int] = (1, 3),
    margin: float | None = None,
) -> RerankerComparison:
    """Compare rerankers by the rank of helpful passages and by LLM answers.

    Args:
        sources: For each method of measuring, which passages help with a question. The LLMs answer only the questions of
            the first one.
        rerankers: Rerankers by name.
        answerers: LLMs by name; None to let no LLM answer.
        controls: Also compare two baselines that do not read the question. The first ranks short passages first. The
            second ranks passages first that helped in the training questions.
        passage_counts: Numbers of passages that the LLMs answer with.
        margin: Also compare the last reranker with a shortcut: reranking is skipped if the retriever's first passage
            scores higher than the second by at least this share of the first score.
    """
    compared: dict[str, Reranker] = dict(rerankers)
    if controls:
        compared[ranking.ShortestFirstRanker.name] = ranking.ShortestFirstRanker()
    rankings = {source.name: _rank_source(source, compared, margin, with_baseline=controls) for source in sources}
    answers = {}
    for llm, answerer in (answerers or {}).items():
        for data, all_rows in sources[0].by_data.items():
            rows = ranking.select_usable(all_rows)
            rankers = _rank_for_answers(rows, sources, compared)
            answers[llm, data] = ranking.measure_answers(rows, rankers, answerer, passage_counts)
    return RerankerComparison(rankings, answers)


def _rank_source(
    source: HeldOutPreferences, rerankers: dict[str, Reranker], margin: float | None, *, with_baseline: bool
) -> RankingResult:
    """Measure how early rerankers put helpful passages, by the preferences of one source.

    `with_baseline` adds a baseline that knows from the training questions of the source which passages helped.
    """
    if with_baseline:
        rerankers = rerankers | {ranking.PassageMeanRanker.name: ranking.PassageMeanRanker(source.training)}
    rankers = ranking.rank_with_all(source.rows, rerankers, margin)
    return ranking.measure_ranking(source.rows, rankers, margin)


def _rank_for_answers(
    rows: Sequence[Preference], sources: Sequence[HeldOutPreferences], rerankers: Mapping[str, Reranker]
) -> ranking.RankerScores:
    """Rank the passages that LLMs answer with: by rerankers, and by one oracle per source."""
    rankers = ranking.rank_with_all(rows, rerankers)
    del rankers[ORACLE]  # it is replaced by the oracles of the sources
    return rankers | build_oracle_rankers(rows, sources)


def build_oracle_rankers(rows: Sequence[Preference], sources: Sequence[HeldOutPreferences]) -> ranking.RankerScores:
    """Build an oracle per source, which ranks passages by how much they helped the LLM.

    A source that did not measure all candidates of the rows is left out.
    """
    oracles: ranking.RankerScores = {}
    for source in sources:
        shifts: dict[tuple[str, str, str], float] = {}  # how much each passage changed the confidence of the LLM
        for row in source.rows:
            for candidate in row.candidates:
                # The text is part of the key, because a source may have measured a shortened passage.
                shifts[row.id, candidate.id, candidate.text] = candidate.shift
        try:
            scores = [[shifts[row.id, item.id, item.text] for item in row.candidates] for row in rows]
        except KeyError:
            continue  # the source did not measure this candidate
        oracles[f"{ORACLE}, {source.name}"] = scores
    return oracles


# --- tables ---------------------------------------------------------------------------------------


def build_reranker_tables(comparison: RerankerComparison) -> list[TextTable]:
    """Build a table of ranking measures per source, and a table of right answers per LLM and data set.

    Each is followed by a table of the differences from the reference, which is the reranker before training, or else the
    retriever.
    """
    tables = []
    for source, result in comparison.rankings.items():
        basis = f"preferences by {source}, {len(result.measures.ids)} questions with helpful and unhelpful passages"
        title = f"Rankers: {basis}; a random order has P@1 {result.chance:.3f}"
        if result.margin is not None and result.margin_share is not None:
            title += f"; the margin {result.margin:g} skips reranking for {result.margin_share:.1%} of the questions"
        tables += _build_measure_tables(result.measures, title, basis)
    for (llm, data), measures in comparison.answers.items():
        basis = f"answers of {llm} to {data}, {len(measures.ids)} questions"
        tables += _build_measure_tables(measures, f"Right {basis}", basis)
    return tables


def _build_measure_tables(measures: RankerMeasures, title: str, basis: str) -> list[TextTable]:
    """Build the table of means with a title, and the table of differences from the reference ranker.

    `basis` says what was measured, such as 'answers of qwen to nq, 120 questions'.
    """
    differences = measures.differences[measures.reference]
    difference_title = f"Difference from {measures.reference}, in points: {basis}"
    return [
        _build_ranker_table(title, measures.rankers, measures.means, format_percent_estimate),
        _build_ranker_table(difference_title, measures.rankers, differences, format_points_estimate),
    ]


def _build_ranker_table(
    title: str, rankers: list[str], values: EstimateTable, format_estimate: Callable[[Estimate], str]
) -> TextTable:
    """Build a table with a row per ranker and a column per measure."""
    rows = []
    for name in rankers:
        estimates = [column[name] for column in values.values() if name in column]
        if estimates:
            rows.append((name, *map(format_estimate, estimates)))
    return TextTable(title, ("ranker", *values), tuple(rows))


# --- as plain data --------------------------------------------------------------------------------


def reranker_comparison_to_dict(comparison: RerankerComparison) -> dict[str, Any]:
    """Convert a comparison of rerankers to plain data for JSON. 'chance' is P@1 of a random order."""
    rankings = {}
    for source, result in comparison.rankings.items():
        numbers = {"chance": result.chance, "margin": result.margin, "margin_share": result.margin_share}
        rankings[source] = {**_measures_to_dict(result.measures), **numbers}
    answers = []
    for (llm, data), measures in comparison.answers.items():
        answers.append({"model": llm, "data": data, **_measures_to_dict(measures)})
    return {"rankings": rankings, "answers": answers}


def _measures_to_dict(measures: RankerMeasures) -> dict[str, Any]:
    """Convert the measures of rankers to plain data.

    'values' are the means. 'less' has, by the name of a baseline, the means minus those of the baseline.
    """
    differences = {baseline: _table_to_dict(table) for baseline, table in measures.differences.items()}
    return {"questions": len(measures.ids), "values": _table_to_dict(measures.means), "less": differences}


def _table_to_dict(table: EstimateTable) -> dict[str, dict[str, Any]]:
    """Convert estimates by measure and ranker to plain data."""
    return {measure: {name: asdict(value) for name, value in values.items()} for measure, values in table.items()}


def iter_prediction_lines(comparison: RerankerComparison) -> Iterator[str]:
    """Yield JSON lines with the results of single questions, without texts.

    The first lines have `hits` by question: a digit for each passage in the ranker's order, 1 if the passage helps, such
    as "100". The other lines have `right` by question: whether the answer with the ranker's first passages is right.
    """
    for source, result in comparison.rankings.items():
        for ranker, hits in result.hits.items():
            by_id = {}
            for question_id, question_hits in zip(result.measures.ids, hits, strict=True):
                by_id[question_id] = "".join("1" if hit else "0" for hit in question_hits)
            yield json.dumps({"preferences": source, "ranker": ranker, "hits": by_id}) + "\n"
    for (llm, data), measures in comparison.answers.items():
        for shown, by_ranker in measures.values.items():
            for ranker, values in by_ranker.items():
                verdicts = [None if np.isnan(value) else int(value) for value in values]
                right = dict(zip(measures.ids, verdicts, strict=True))
                yield json.dumps({"model": llm, "data": data, "shown": shown, "ranker": ranker, "right": right}) + "\n"
