"""Rankers side by side on held-out preferences: the retriever, the base, the aligned cross-encoder, the oracle.

Ranking measures against the positives (CBDR 4.1.4), and the accuracy of the LLM's answers with the first passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from knowgate.display import markdown_text
from knowgate.errors import BadInput
from knowgate.evaluation.reranking.answers import Answering
from knowgate.preferences import Preference, rank_values, ranking
from knowgate.rerank import is_sure
from knowgate.statistics import Estimate, Floats, estimate_mean
from knowgate.types import Passage, Reranker

RETRIEVER, ORACLE, BARE = "retriever", "oracle", "no passages"
SHOWN = (1, 3)  # passages the LLM answers with


@dataclass(frozen=True)
class Ranker:
    """One way of ordering candidates: a score for each candidate of each row."""

    name: str
    scores: list[list[float]] = field(repr=False)


@dataclass(frozen=True)
class Comparison:
    """Per-question values of each ranker: measure -> ranker -> values.

    chance: P@1 of a random order. margin_share: questions for which reranking is skipped.
    """

    n_ranked: int
    n_answered: int
    chance: float
    values: Mapping[str, Mapping[str, Floats]] = field(repr=False)
    margin: float | None = None
    margin_share: float | None = None


def compare_rankers(
    rows: Sequence[Preference],
    rerankers: Mapping[str, Reranker],
    *,
    answering: Answering | None = None,
    shown: Sequence[int] = SHOWN,
    margin: float | None = None,
    on_progress: Callable[[str], None] = lambda word: None,
) -> Comparison:
    """Order every row's candidates in every way; answer with the first ones if an LLM is given.

    Ranking measures need positives and negatives, so they are taken on rows that have both; answers on all rows.
    """
    rows = [row for row in rows if row.error is None and row.candidates]
    kept = [row for row in rows if row.is_kept]
    if not kept:
        raise BadInput(
            f"none of the {len(rows)} held-out questions has passages of both kinds; prefer more questions, or some "
            "with --split test."
        )
    rankers = rank_all(rows, rerankers, margin, on_progress)
    with_both = [number for number, row in enumerate(rows) if row.is_kept]
    values: dict[str, dict[str, Floats]] = {}
    for ranker in rankers:
        measured = rank_values(kept, [ranker.scores[number] for number in with_both])
        for name, numbers in measured.items():
            values.setdefault(name, {})[ranker.name] = numbers
    if answering:
        values |= answer_all(rows, rankers, answering, shown, on_progress)
    share = float(np.mean([is_sure(_passages(row), margin) for row in rows])) if margin is not None else None
    chance = float(np.mean([len(row.positives) / len(row.pool) for row in kept]))
    return Comparison(len(kept), len(rows) if answering else 0, chance, values, margin, share)


def rank_all(
    rows: Sequence[Preference],
    rerankers: Mapping[str, Reranker],
    margin: float | None,
    on_progress: Callable[[str], None],
) -> list[Ranker]:
    """The retriever's own order, each reranker's, with the margin rule the last reranker's again, and the oracle's."""
    kept_order = [[-float(rank) for rank in range(len(row.candidates))] for row in rows]
    rankers = [Ranker(RETRIEVER, kept_order)]
    for name, reranker in rerankers.items():
        on_progress(f"reranking: {name}")
        rankers.append(Ranker(name, reranker.score([row.question for row in rows], [_passages(row) for row in rows])))
    if margin is not None and rerankers:
        last = rankers[-1]
        chosen = [
            plain if is_sure(_passages(row), margin) else scored
            for row, plain, scored in zip(rows, kept_order, last.scores, strict=True)
        ]
        rankers.append(Ranker(f"{last.name}, margin {margin:g}", chosen))
    return [*rankers, Ranker(ORACLE, [[candidate.shift for candidate in row.candidates] for row in rows])]


def answer_all(
    rows: Sequence[Preference],
    rankers: Sequence[Ranker],
    answering: Answering,
    shown: Sequence[int],
    on_progress: Callable[[str], None],
) -> dict[str, dict[str, Floats]]:
    """Whether the LLM is right with the first passages of each ranker, as many as `shown` says, and with none."""
    questions = [row.asked for row in rows]
    on_progress(f"answering: {BARE}")
    bare = answering.correct(questions, [[] for _ in rows])
    values: dict[str, dict[str, Floats]] = {}
    for k in shown:
        values[f"accuracy, top {k}"] = {BARE: bare}
        for ranker in rankers:
            on_progress(f"answering: {ranker.name}, top {k}")
            first = [
                [row.candidates[number].passage for number in ranking(scores)[:k]]
                for row, scores in zip(rows, ranker.scores, strict=True)
            ]
            values[f"accuracy, top {k}"][ranker.name] = answering.correct(questions, first)
    return values


def _passages(row: Preference) -> list[Passage]:
    return [candidate.passage for candidate in row.candidates]


# --- the table ------------------------------------------------------------------------------------


def summary(comparison: Comparison) -> dict[str, Any]:
    """Every value with its interval, and every paired difference between two rankers."""
    return {
        "questions_ranked": comparison.n_ranked,
        "questions_answered": comparison.n_answered,
        "chance": comparison.chance,
        "margin": comparison.margin,
        "margin_share": comparison.margin_share,
        "values": {
            measure: {name: asdict(_known(numbers)) for name, numbers in by_ranker.items()}
            for measure, by_ranker in comparison.values.items()
        },
        "differences": {
            measure: {
                f"{second} - {first}": asdict(_known(by_ranker[second] - by_ranker[first]))
                for first, second in combinations(by_ranker, 2)
            }
            for measure, by_ranker in comparison.values.items()
        },
    }


def _known(numbers: Floats) -> Estimate:
    """Answers without a gold answer are not graded; they are left out on both sides of a difference."""
    return estimate_mean(numbers[~np.isnan(numbers)])


def markdown(summed: Mapping[str, Any], title: str = "Rerankers") -> str:
    """The tables of a summary: values, then the gains that matter."""
    measures = list(summed["values"])
    names = list(dict.fromkeys(name for measure in measures for name in summed["values"][measure]))
    lines = [
        f"# {title}",
        "",
        f"Ranking measures on {summed['questions_ranked']} held-out questions with passages of both kinds"
        + (f"; answers on {summed['questions_answered']}" if summed["questions_answered"] else "")
        + f". A random order has P@1 {summed['chance']:.3f}. 95 % bootstrap intervals over questions; differences are "
        "paired.",
        "",
        "| measure | " + " | ".join(map(markdown_text, names)) + " |",
        "|---|" + "---|" * len(names),
    ]
    for measure in measures:
        cells = [_cell(summed["values"][measure].get(name)) for name in names]
        lines.append(f"| {measure} | " + " | ".join(cells) + " |")
    rankers = [name for name in names if name not in (BARE, ORACLE)]
    pairs = [f"{second} - {first}" for first, second in combinations(rankers, 2)]
    lines += ["", "| difference | " + " | ".join(map(markdown_text, pairs)) + " |", "|---|" + "---|" * len(pairs)]
    for measure in measures:
        cells = [_difference(summed["differences"][measure].get(pair)) for pair in pairs]
        lines.append(f"| {measure} | " + " | ".join(cells) + " |")
    if summed["margin"] is not None:
        lines += [
            "",
            f"The margin {summed['margin']:g} skips reranking for {summed['margin_share']:.1%} of the questions.",
        ]
    return "\n".join(lines) + "\n"


def _cell(value: Mapping[str, float] | None) -> str:
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]" if value else ""


def _difference(value: Mapping[str, float] | None) -> str:
    return f"{value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]" if value else ""
