"""Rerankers with a larger base: what is chosen on dev questions, P@1 and right answers on test questions.

    python -m benchmarks.tables.cbdr_larger_base

The protocol is in the docstring of `benchmarks.cbdr_alignment`. `benchmarks.paper_record` writes the record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from benchmarks.cbdr_alignment import EFFECTS, SOURCES, read_effects
from benchmarks.paper_record import LARGER_BASE, read_record
from benchmarks.tables.cbdr_alignment import HOME, estimate_gap, read_answers
from benchmarks.tables.common import Rows, table
from knowgate.data.preferences import select_passages

SEEDS = tuple(f"aligned_seed{seed}" for seed in range(3))
MARGIN = "margin_seed0"
RANKINGS: dict[str, tuple[str, ...]] = {
    "seed 0": SEEDS[:1],
    "ensemble": SEEDS,
    "margin": (MARGIN,),
    "ensemble and margin": (*SEEDS, MARGIN),
}


@cache
def load_effects() -> dict[tuple[str, str], list[Any]]:
    """Return the recorded effects of the candidates."""
    return read_effects(EFFECTS)


def list_rankings() -> list[str]:
    """List the rankings whose trainings are finished."""
    trained = {name for row in read_record(LARGER_BASE)[:1] for name in row["logits"]}
    return [name for name, members in RANKINGS.items() if trained.issuperset(members)]


def score_candidates(row: Mapping[str, Any], ranking: str, source: str) -> dict[str, float]:
    """Return the score of each candidate: the source's head, averaged over the members of the ranking."""
    if ranking == "relevance":
        return {key: values[0] for key, values in row["logits"]["relevance"].items()}
    head, members = SOURCES.index(source), RANKINGS[ranking]
    logits = {name: {key: values[head] for key, values in row["logits"][name].items()} for name in members}
    seeds = [logits[name] for name in members if name != MARGIN]
    parts = [_average(seeds)] if seeds else []
    return _average([*parts, logits[MARGIN]] if MARGIN in members else parts)


def _average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([part[key] for part in parts])) for key in parts[0]}


def measure_ranking(ranking: str, source: str, scored_by: str, *, is_test: bool) -> dict[str, int]:
    """Return by question whether the first passage is a positive of a source (P@1).

    Args:
        ranking: Name of the ranking.
        source: Source of the preferences.
        scored_by: Source whose head ranks the passages.
        is_test: Whether test questions are measured, or dev questions.
    """
    hits = {}
    for row in read_record(LARGER_BASE):
        if row["test"] == is_test:
            split = "test" if is_test else "train"
            effects = load_effects()[f"pref-{source}-{row['set']}-{split}", row["id"]]
            selected = select_passages([each[1] for each in effects], [each[2] for each in effects])
            if selected.positives and selected.negatives:
                scores = score_candidates(row, ranking, scored_by)
                pool = sorted({*selected.positives, *selected.negatives})
                best = max(pool, key=lambda index: scores[effects[index][0]])
                hits[row["id"]] = int(best in selected.positives)
    return hits


def measure_answers(ranking: str, scored_by: str) -> dict[str, int]:
    """Return by test question whether the LLM answers right with the first passage of a ranking."""
    right = {}
    for row in read_record(LARGER_BASE):
        if row["test"]:
            scores = score_candidates(row, ranking, scored_by)
            effects = load_effects()[f"pref-benefit-{row['set']}-test", row["id"]]
            best = max(effects, key=lambda each: scores[each[0]])
            right[row["id"]] = int(bool(best[2]))
    return right


def choose_ranking(source: str) -> tuple[str, dict[str, float]]:
    """Return the ranking with the highest P@1 on dev questions, the first of equals, and P@1 of all."""
    values = {
        name: float(np.mean(list(measure_ranking(name, source, source, is_test=False).values())))
        for name in list_rankings()
    }
    return max(values, key=lambda name: values[name]), values


def read_base_hits(source: str) -> dict[str, int]:
    """Return by test question whether the first passage of MiniLM's base is a positive."""
    with gzip.open(HOME / "predictions.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    record = next(each for each in records if each.get("preferences") == source and each["ranker"] == "base")
    return {key: int(marks[0]) for key, marks in record["hits"].items()}


def compare(values: Mapping[str, int], base: Mapping[str, int]) -> str:
    """Format the paired difference over the questions of both."""
    return estimate_gap(np.array([values[key] - base[key] for key in values if key in base], dtype=float))


def format_own_target(source: str) -> str:
    """Return P@1 of a source by relevance alone and by the chosen ranking, and their paired difference."""
    relevance = measure_ranking("relevance", source, source, is_test=True)
    aligned = measure_ranking(choose_ranking(source)[0], source, source, is_test=True)
    first, second = (100 * np.mean(list(hits.values())) for hits in (relevance, aligned))
    return f"{first:.1f} to {second:.1f}: {compare(aligned, relevance)}"


def format_right_answers(source: str) -> str:
    """Return the right answers with the first passage by relevance alone and by the chosen ranking, and their difference."""
    relevance = measure_answers("relevance", "relevance")
    aligned = measure_answers(choose_ranking(source)[0], source)
    first, second = (100 * np.mean(list(right.values())) for right in (relevance, aligned))
    return f"{first:.1f} to {second:.1f}: {compare(aligned, relevance)}"


def larger_base_tables() -> Iterator[str]:
    """Render the section, or nothing without a record."""
    if not list_rankings():
        return
    has_relevance = "relevance" in read_record(LARGER_BASE)[0]["logits"]
    chosen, dev = {}, {}
    for source in SOURCES:
        chosen[source], dev[source] = choose_ranking(source)
    yield "\n### A larger base\n"
    yield (
        "Qwen2.5-Coder-1.5B with LoRA in place of MiniLM (70 times as large), on the same questions, candidates and effects. The "
        "second protocol in the docstring of `benchmarks/cbdr_alignment.py` was written before the run. *Relevance* learned "
        "which passages contain the answer; it is the base of this size. P@1 on dev questions, by which the ranking was chosen:\n"
    )
    names = list_rankings()
    rows: Rows = [(source, *(f"{100 * dev[source][name]:.1f}" for name in names), chosen[source]) for source in SOURCES]
    yield table(("source", *names, "chosen"), rows)
    orders = [("relevance", "relevance")] if has_relevance else []
    orders += [(chosen[source], source) for source in SOURCES]
    rows = []
    for source in SOURCES:
        base = read_base_hits(source)
        relevance = measure_ranking("relevance", source, source, is_test=True) if has_relevance else {}
        rows.append((source, "MiniLM, base", f"{100 * np.mean(list(base.values())):.1f}", "–", "–"))
        for ranking, scored_by in orders:
            hits = measure_ranking(ranking, source, scored_by, is_test=True)
            title = "relevance" if ranking == "relevance" else f"{scored_by} ({ranking})"
            against = compare(hits, relevance) if relevance and ranking != "relevance" else "–"
            value = f"{100 * np.mean(list(hits.values())):.1f}"
            rows.append((source, title, value, compare(hits, base), against))
    yield "\nP@1 on test questions, by the source of the preferences:\n"
    yield table(("preferences by", "order", "P@1", "against MiniLM's base", "against relevance"), rows)
    yield "\nRight answers with the first passage:\n"
    yield _answer_table(orders, has_relevance)


def _answer_table(orders: Sequence[tuple[str, str]], has_relevance: bool) -> str:
    base = read_answers(HOME)["top 1", "base"]
    relevance = measure_answers("relevance", "relevance") if has_relevance else {}
    parts = {"MiniLM, base": dict(base)}
    for ranking, scored_by in orders:
        title = "relevance" if ranking == "relevance" else f"{scored_by} ({ranking})"
        parts[title] = relevance if ranking == "relevance" else measure_answers(ranking, scored_by)
    rows: Rows = []
    for title, right in parts.items():
        shares = [
            f"{100 * np.mean([value for key, value in right.items() if key.startswith(name)]):.1f}"
            for name in ("nq", "hotpotqa")
        ]
        against = compare(right, base) if title != "MiniLM, base" else "–"
        other = compare(right, relevance) if relevance and title not in ("MiniLM, base", "relevance") else "–"
        rows.append((title, *shares, against, other))
    return table(("order", "NQ", "HotpotQA", "against MiniLM's base", "against relevance"), rows)


if __name__ == "__main__":
    print("\n".join(larger_base_tables()))
