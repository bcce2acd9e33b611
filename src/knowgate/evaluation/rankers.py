"""Ways of ordering candidates, held against preferences: the retriever, rerankers, controls, the oracle.

Knows scores and ranking measures (CBDR 4.1.4); what the LLM makes of the first passages is `answers`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
PASSAGE_COUNTS = (1, 3)  # passages the LLM answers with
Notify = Callable[[str], None]
EstimateTable = dict[str, dict[str, Estimate]]  # measure -> ranker -> value with interval


@dataclass(frozen=True)
class Ranker:
    """One way of ordering candidates: a score for each candidate of each row."""

    name: str
    scores: list[list[float]] = field(repr=False)


@dataclass(frozen=True)
class RankerMeasures:
    """Per-question values of each ranker: measure -> ranker -> values, of the questions `ids` in their order."""

    ids: list[str] = field(repr=False)
    values: Mapping[str, Mapping[str, FloatArray]] = field(repr=False)

    @property
    def rankers(self) -> list[str]:
        return list(dict.fromkeys(name for by_ranker in self.values.values() for name in by_ranker))

    @property
    def reference(self) -> str:
        """What the others are compared with: the cross-encoder before alignment, else the retriever's order."""
        return BASE if BASE in self.rankers else RETRIEVER

    @cached_property
    def means(self) -> EstimateTable:
        """Every ranker's mean with its interval, by measure."""
        return _estimated({measure: dict(by_ranker) for measure, by_ranker in self.values.items()})

    @cached_property
    def differences(self) -> dict[str, EstimateTable]:
        """Every other ranker less the reference, and less the retriever's order, question by question."""
        return {other: _estimated(self._less(other)) for other in dict.fromkeys([self.reference, RETRIEVER])}

    def _less(self, other: str) -> dict[str, dict[str, FloatArray]]:
        return {
            measure: {name: numbers - by_ranker[other] for name, numbers in by_ranker.items() if name != other}
            for measure, by_ranker in self.values.items()
        }


def _estimated(values: Mapping[str, Mapping[str, FloatArray]]) -> EstimateTable:
    """Answers without a gold answer are not graded; they are left out on both sides of a difference."""
    keys = [(measure, name) for measure, by_ranker in values.items() for name in by_ranker]
    found = dict(zip(keys, estimate_means([values[measure][name] for measure, name in keys]), strict=True))
    return {measure: {name: found[measure, name] for name in by_ranker} for measure, by_ranker in values.items()}


@dataclass(frozen=True)
class RankingResult:
    """Rankers against the preferences of one source. hits: ranker -> row -> which of the pool, best first, help.

    chance: P@1 of a random order. margin_share: questions for which reranking is skipped.
    """

    measured: RankerMeasures
    hits: Mapping[str, list[list[bool]]] = field(repr=False)
    chance: float
    margin: float | None = None
    margin_share: float | None = None


def select_usable(rows: Sequence[Preference]) -> list[Preference]:
    """Rows that can be ranked at all: they did not fail and have candidates."""
    return [row for row in rows if row.error is None and row.candidates]


def rank_with_all(
    rows: Sequence[Preference],
    rerankers: Mapping[str, Reranker],
    margin: float | None = None,
    say: Notify = lambda word: None,
) -> list[Ranker]:
    """The retriever's own order, each reranker's, with the margin rule the last reranker's again, and the oracle's."""
    kept_order = [[-float(rank) for rank in range(len(row.candidates))] for row in rows]
    rankers = [Ranker(RETRIEVER, kept_order)]
    for name, reranker in rerankers.items():
        say(f"reranking: {name}")
        rankers.append(
            Ranker(name, reranker.score([row.question for row in rows], [list_passages(row) for row in rows]))
        )
    if margin is not None and rerankers:
        last = rankers[-1]
        chosen = [
            plain if can_skip_reranking(list_passages(row), margin) else scored
            for row, plain, scored in zip(rows, kept_order, last.scores, strict=True)
        ]
        rankers.append(Ranker(f"{last.name}, margin {margin:g}", chosen))
    return [*rankers, Ranker(ORACLE, [[candidate.shift for candidate in row.candidates] for row in rows])]


def measure_ranking(
    rows: Sequence[Preference], rankers: Sequence[Ranker], margin: float | None = None
) -> RankingResult:
    """Ranking measures need positives and negatives, so they are taken on rows that have both."""
    with_both = [number for number, row in enumerate(rows) if row.is_kept]
    kept = [rows[number] for number in with_both]
    if not kept:
        raise BadInput(
            f"none of the {len(rows)} held-out questions has passages of both kinds; prefer more questions, or some "
            "with --split test."
        )
    values: dict[str, dict[str, FloatArray]] = {}
    hits: dict[str, list[list[bool]]] = {}
    for ranker in rankers:
        scores = [ranker.scores[number] for number in with_both]
        hits[ranker.name] = [rank_hits(row, own) for row, own in zip(kept, scores, strict=True)]
        for name, numbers in compute_rank_metrics(kept, scores).items():
            values.setdefault(name, {})[ranker.name] = numbers
    share = (
        float(np.mean([can_skip_reranking(list_passages(row), margin) for row in rows])) if margin is not None else None
    )
    chance = float(np.mean([len(row.positives) / len(row.pool) for row in kept]))
    return RankingResult(RankerMeasures([row.id for row in kept], values), hits, chance, margin, share)


def measure_answers(
    rows: Sequence[Preference],
    rankers: Sequence[Ranker],
    answering: CachedAnswerer,
    shown: Sequence[int] = PASSAGE_COUNTS,
    say: Notify = lambda word: None,
) -> RankerMeasures:
    """Whether the LLM is right with the first passages of each ranker, as many as `shown` says, and with none."""
    questions = [row.to_question() for row in rows]
    say(f"answering: {NO_PASSAGES}")
    bare = answering.correct(questions, [[] for _ in rows])
    values: dict[str, dict[str, FloatArray]] = {}
    for k in shown:
        values[f"top {k}"] = {NO_PASSAGES: bare}
        for ranker in rankers:
            say(f"answering: {ranker.name}, top {k}")
            first = [
                [row.candidates[number].passage for number in rank_scores(scores)[:k]]
                for row, scores in zip(rows, ranker.scores, strict=True)
            ]
            values[f"top {k}"][ranker.name] = answering.correct(questions, first)
    return RankerMeasures([row.id for row in rows], values)


def list_passages(row: Preference) -> list[Passage]:
    return [candidate.passage for candidate in row.candidates]


class ShortestFirstRanker:
    """Shorter passages first. Whatever it reaches, length alone reaches."""

    name = fingerprint = "shortest first"

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[-float(len(passage.text)) for passage in found] for found in passages]


class PassageMeanRanker:
    """A passage's mean shift over the training questions it was a candidate of; 0 if it was none's."""

    name = "passage means"

    def __init__(self, learnt: Iterable[Preference]):
        shifts: dict[str, list[float]] = {}
        for candidate in (one for row in learnt for one in row.candidates):
            shifts.setdefault(candidate.id, []).append(candidate.shift)
        self.means = {name: float(np.mean(found)) for name, found in shifts.items()}

    @property
    def fingerprint(self) -> str:
        return sha256_text(*(f"{name}={mean!r}" for name, mean in sorted(self.means.items())))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[self.means.get(passage.id, 0.0) for passage in found] for found in passages]

    def seen(self, rows: Iterable[Preference]) -> float:
        """Share of the rows' candidates that training questions had too."""
        known = [candidate.id in self.means for row in rows for candidate in row.candidates]
        return float(np.mean(known)) if known else 0.0
