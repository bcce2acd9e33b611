"""Measurement of rankers: does the order they give to candidate passages put helpful ones first (CBDR, 4.1.4)?

Preferences say which passages help: with them, the LLM is more confident of the correct answer than without. This
change of confidence is called the shift of a passage. Rankers are the retriever, rerankers, and the oracle, which
orders passages by their shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.data.preferences import Preference, compute_rank_metrics, rank_hits, rank_scores
from knowgate.errors import BadInput
from knowgate.evaluation.reranker_cache import CachedAnswerer
from knowgate.retrieval.rerankers import can_skip_reranking
from knowgate.stats.bootstrap import Estimate, estimate_means
from knowgate.stats.metrics import FloatArray
from knowgate.types import Passage, Reranker

RETRIEVER, BASE, ORACLE, NO_PASSAGES = "retriever", "base", "oracle", "no passages"
ValueTable = Mapping[str, Mapping[str, FloatArray]]  # measure -> ranker -> value of each question
RankerScores = dict[str, list[list[float]]]  # ranker -> for each question, one score per candidate; higher is better
EstimateTable = dict[str, dict[str, Estimate]]  # measure -> ranker -> mean


@dataclass(frozen=True)
class RankerMeasures:
    """Quality of several rankers on each question, by one or more measures.

    Attributes:
        ids: Ids of the questions.
        values: By measure (such as 'P@1') and name of the ranker, an array with the value of each question.
    """

    ids: list[str] = field(repr=False)
    values: ValueTable = field(repr=False)

    @property
    def rankers(self) -> list[str]:
        """Names of all rankers."""
        return list(dict.fromkeys(name for by_ranker in self.values.values() for name in by_ranker))

    @property
    def reference(self) -> str:
        """Name of the reference ranker: the cross-encoder before training, else the retriever."""
        return BASE if BASE in self.rankers else RETRIEVER

    @cached_property
    def means(self) -> EstimateTable:
        """Mean over questions, by measure and ranker."""
        return _estimate_table(self.values)

    @cached_property
    def differences(self) -> dict[str, EstimateTable]:
        """Mean difference of each ranker to the reference and to the retriever.

        Example: `differences['retriever']['P@1']['base']`.
        """
        return {baseline: _estimate_table(self._subtract(baseline)) for baseline in (self.reference, RETRIEVER)}

    def _subtract(self, baseline: str) -> ValueTable:
        """Return the values of all rankers minus those of the ranker `baseline`, question by question."""
        differences: dict[str, dict[str, FloatArray]] = {}
        for measure, by_ranker in self.values.items():
            others = [ranker for ranker in by_ranker if ranker != baseline]
            differences[measure] = {ranker: by_ranker[ranker] - by_ranker[baseline] for ranker in others}
        return differences


def _estimate_table(values: ValueTable) -> EstimateTable:
    """Estimate the mean of each measure and ranker, with an interval."""
    keys = [(measure, ranker) for measure, by_ranker in values.items() for ranker in by_ranker]
    columns = [values[measure][ranker] for measure, ranker in keys]
    table: EstimateTable = {measure: {} for measure in values}
    # One call estimates all columns, so that they share their bootstrap resamples.
    for (measure, ranker), estimate in zip(keys, estimate_means(columns), strict=True):
        table[measure][ranker] = estimate
    return table


@dataclass(frozen=True)
class RankingResult:
    """Ranking quality of rankers: how early helpful passages come.

    A passage is helpful if the LLM was more confident of the correct answer with it, as preferences record.

    Attributes:
        measures: Ranking measures of each ranker, such as P@1.
        hits: By ranker, for each question: whether each passage helps (a hit), in the ranker's order.
        chance: P@1 of a random order: how often its first passage helps.
        margin: Reranking is skipped if the retriever's first passage scores higher than the second by at least this
            share of the first score. None: it is never skipped.
        margin_share: Share of questions for which reranking is skipped.
    """

    measures: RankerMeasures
    hits: Mapping[str, list[list[bool]]] = field(repr=False)
    chance: float
    margin: float | None = None
    margin_share: float | None = None


def select_usable(rows: Sequence[Preference]) -> list[Preference]:
    """Return the rows that did not fail and have candidate passages."""
    return [row for row in rows if row.error is None and row.candidates]


def rank_with_all(
    rows: Sequence[Preference], rerankers: Mapping[str, Reranker], margin: float | None = None
) -> RankerScores:
    """Score each question's passages with the retriever, every reranker and the oracle.

    The oracle knows how much each passage helps.

    Args:
        rows: Questions with candidates.
        rerankers: Rerankers by name.
        margin: Adds one more ranker: the last reranker, but with the retriever's order if the retriever's first passage
            scores higher than the second by at least this share of the first score.
    """
    questions = [row.question for row in rows]
    passages = [list_passages(row) for row in rows]
    # Candidates are in the retriever's order, so their scores are 0, -1, -2, ...
    rankers = {RETRIEVER: [[-float(rank) for rank in range(len(row.candidates))] for row in rows]}
    for name, reranker in rerankers.items():
        rankers[name] = reranker.score(questions, passages)
    if margin is not None and rerankers:
        last = list(rerankers)[-1]
        is_skipped = [can_skip_reranking(candidates, margin) for candidates in passages]
        pairs = zip(is_skipped, rankers[RETRIEVER], rankers[last], strict=True)
        rankers[f"{last}, margin {margin:g}"] = [first if skips else scores for skips, first, scores in pairs]
    rankers[ORACLE] = [[candidate.shift for candidate in row.candidates] for row in rows]
    return rankers


def measure_ranking(rows: Sequence[Preference], rankers: RankerScores, margin: float | None = None) -> RankingResult:
    """Measure how early rankers put helpful passages.

    Only questions with both helpful and unhelpful passages are measured.

    Args:
        rows: Questions with candidate passages.
        rankers: Scores that each ranker gave to the candidates.
        margin: Reranking is skipped if the retriever's first passage scores higher than the second by at least this
            share of the first score. How often that happens is measured. None: it is never skipped.

    Raises:
        BadInput: No row has passages of both kinds.
    """
    measured = [row for row in rows if row.is_kept]  # the questions with passages of both kinds
    if not measured:
        raise BadInput(
            f"none of the {len(rows)} held-out questions has both helpful and unhelpful passages. Such questions are needed to "
            "compare rerankers. Measure more with `knowgate prefer`."
        )
    values: dict[str, dict[str, FloatArray]] = {}
    hits: dict[str, list[list[bool]]] = {}
    for name, all_scores in rankers.items():
        scores = [row_scores for row, row_scores in zip(rows, all_scores, strict=True) if row.is_kept]
        hits[name] = list(map(rank_hits, measured, scores))
        for measure, by_question in compute_rank_metrics(measured, scores).items():
            values.setdefault(measure, {})[name] = by_question
    chance = float(np.mean([len(row.positives) / len(row.pool) for row in measured]))
    measures = RankerMeasures([row.id for row in measured], values)
    if margin is None:  # reranking is never skipped
        return RankingResult(measures, hits, chance)
    is_skipped = [can_skip_reranking(list_passages(row), margin) for row in rows]
    return RankingResult(measures, hits, chance, margin, margin_share=float(np.mean(is_skipped)))


def measure_answers(
    rows: Sequence[Preference], rankers: RankerScores, answerer: CachedAnswerer, passage_counts: Sequence[int]
) -> RankerMeasures:
    """Measure an LLM's accuracy with the first passages of each ranker, and without passages.

    Args:
        rows: Questions with candidate passages.
        rankers: Scores of the candidates.
        answerer: The LLM with its grader. Answers in its cache are not generated again.
        passage_counts: Numbers of passages to show.
    """
    questions = [row.to_question() for row in rows]
    without_passages = answerer.grade_answers(questions, [[] for _ in rows])
    values: dict[str, dict[str, FloatArray]] = {}
    for count in passage_counts:
        by_ranker = {NO_PASSAGES: without_passages}
        for name, scores in rankers.items():
            first_passages = _select_first_passages(rows, scores, count)
            by_ranker[name] = answerer.grade_answers(questions, first_passages)
        values[f"top {count}"] = by_ranker
    return RankerMeasures([row.id for row in rows], values)


def _select_first_passages(
    rows: Sequence[Preference], scores: Sequence[Sequence[float]], count: int
) -> list[list[Passage]]:
    """Return the passages of each question with the highest scores, highest first."""
    first_passages = []
    for row, row_scores in zip(rows, scores, strict=True):
        first_passages.append([row.candidates[index].passage for index in rank_scores(row_scores)[:count]])
    return first_passages


def list_passages(row: Preference) -> list[Passage]:
    """Return the candidate passages of a row."""
    return [candidate.passage for candidate in row.candidates]


# --- controls: rankers that do not read the question ----------------------------------------------


class ShortestFirstRanker:
    """Baseline that ranks shorter passages first, to show what passage length alone achieves."""

    name = fingerprint = "shortest first"

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Score each passage by its negative length."""
        return [[-float(len(passage.text)) for passage in candidates] for candidates in passages]


class PassageMeanRanker:
    """Baseline that scores a passage by its mean help on training questions. Help is the LLM's gain in confidence."""

    name = "passage means"

    def __init__(self, training: Iterable[Preference]):
        shifts: dict[str, list[float]] = {}
        for row in training:
            for candidate in row.candidates:
                shifts.setdefault(candidate.id, []).append(candidate.shift)
        self.means = {passage_id: float(np.mean(values)) for passage_id, values in shifts.items()}

    @property
    def fingerprint(self) -> str:
        """Hash of all mean shifts, for caches."""
        return sha256_text(*(f"{passage_id}={mean!r}" for passage_id, mean in sorted(self.means.items())))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Score each passage by its mean shift on training questions."""
        return [[self.means.get(passage.id, 0.0) for passage in candidates] for candidates in passages]
