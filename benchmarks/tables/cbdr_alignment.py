"""Tables of aligned rerankers with recipes chosen on dev questions: P@1 of their own target, and answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cbdr_alignment import RECIPES, REFERENCE, SOURCES, choose_recipe_of
from benchmarks.tables.common import RUNS, Rows, table

HOME = RUNS / "cbdr" / "alignment"
TOPS = ("top 1", "top 3")


def render_alignment(home: Path = HOME) -> Iterator[str]:
    """Yield the section: what was chosen on dev questions, P@1 on test questions, right answers."""
    if not (home / "rerank.json").is_file():
        return
    result = json.loads((home / "rerank.json").read_text(encoding="utf-8"))
    selections = {source: read_selections(home, source) for source in SOURCES}
    chosen = {source: choose_recipe_of(selections[source]) for source in SOURCES}
    yield "### Rerankers whose weights are chosen on dev questions\n"
    yield (
        "`benchmarks/cbdr_alignment.py`; its docstring is the protocol, written before the run. Test questions: "
        f"{_count_questions(result)}, 8 candidates of BM25 each (*retriever*). Preferences were learned from train questions "
        "of NQ, HotpotQA and TriviaQA. The *base* is MiniLM, taught which passages contain the answer. *Paper* is one epoch at "
        "6e-5 with the last weights. Differences to the base are paired, with 95 % bootstrap intervals. "
        "[Record](../runs/cbdr/alignment): predictions by question, what each passage changed, settings of all trainings.\n"
    )
    yield "P@1 on dev questions. The weights with the highest P@1 are kept; they may be an average with the base:\n"
    yield _format_dev(selections)
    yield "\nP@1 on test questions, by the source of the preferences:\n"
    yield _format_ranking(result, chosen)
    yield "\nRight answers with the first passages of each order, and their difference to the base, both data sets:\n"
    yield _format_answers(home, result)
    yield format_seconds(home)


def read_selections(home: Path, source: str) -> dict[str, dict[str, Any]]:
    """Return how the weights of each recipe were chosen; recipes without a choice are left out."""
    selections = {}
    for recipe in RECIPES:
        file = home / f"{source}-{recipe}.reranker.json"
        selection = json.loads(file.read_text(encoding="utf-8"))["selection"] if file.is_file() else None
        if selection:
            selections[recipe] = selection
    return selections


def _count_questions(result: dict[str, Any]) -> str:
    return ", ".join(f"{part['questions']:,} of {part['data'].removeprefix('bench:')}" for part in result["answers"])


def _format_dev(selections: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows: Rows = []
    for source, by_recipe in selections.items():
        for recipe, selection in by_recipe.items():
            last = selection["history"][-1][1]
            numbers = [f"{100 * value:.1f}" for value in (selection["base"], last, selection["chosen"])]
            rows.append((source, recipe, f"{selection['questions']:,}", *numbers, f"{selection['share']:g}"))
    columns = (
        "source",
        "recipe",
        "dev questions",
        "base",
        "last weights",
        "chosen weights",
        "share of trained weights",
    )
    return table(columns, rows)


def _format_ranking(result: dict[str, Any], chosen: dict[str, str]) -> str:
    rows: Rows = []
    for source in SOURCES:
        ranking = result["rankings"][source]
        values, gaps = ranking["values"]["P@1"], ranking["less"]["base"]["P@1"]
        for name in ("retriever", "base", *(f"{trained}{end}" for trained in SOURCES for end in (f"-{REFERENCE}", ""))):
            recipe = f" ({chosen[name]})" if name in chosen else ""
            gap = format_gap(gaps[name]) if name in gaps else "–"
            rows.append((source, f"{ranking['questions']:,}", name + recipe, f"{100 * values[name]['value']:.1f}", gap))
    return table(("preferences by", "n", "order", "P@1", "against the base"), rows)


def format_gap(gap: dict[str, float]) -> str:
    """Format a difference in points with its interval."""
    return f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"


def _format_answers(home: Path, result: dict[str, Any]) -> str:
    right = read_answers(home)
    names = list(result["answers"][0]["values"][TOPS[0]])
    rows: Rows = []
    for name in names:
        cells = [
            f"{100 * part['values'][top][name]['value']:.1f}" if name in part["values"][top] else "–"
            for part in result["answers"]
            for top in TOPS
        ]
        gaps = ["–" if name == "base" else compare_answers(right, top, name) for top in TOPS]
        rows.append((name, *cells, *gaps))
    columns = [f"{part['data'].removeprefix('bench:')}, {top}" for part in result["answers"] for top in TOPS]
    return table(("order", *columns, *(f"against the base, {top}" for top in TOPS)), rows)


def format_seconds(home: Path) -> str:
    """Return a sentence on how long the steps took on the GPU."""
    seconds = json.loads((home / "seconds.json").read_text(encoding="utf-8"))

    def total(prefix: str) -> str:
        return f"{sum(value for step, value in seconds.items() if step.startswith(prefix)):.0f}"

    fits = [value for step, value in seconds.items() if step.startswith("fit-")]
    return (
        f"\nSeconds on one H200: base {total('relevance')}, answers without passages {total('label-')}, preferences by "
        f"benefit {total('prefer-benefit')} and by likelihood {total('prefer-likelihood')}, each of {len(fits)} rerankers "
        f"{min(fits):.0f} to {max(fits):.0f}, comparison {total('compare')}. Steps ran beside each other, so each alone would "
        "be faster.\n"
    )


def read_answers(home: Path) -> dict[tuple[str, str], dict[str, int]]:
    """Return whether each answer is right, by number of passages and reranker, then by question of both data sets."""
    right: dict[tuple[str, str], dict[str, int]] = {}
    with gzip.open(home / "predictions.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "right" in record:
                right.setdefault((record["shown"], record["ranker"]), {}).update(record["right"])
    return right


def compare_answers(right: dict[tuple[str, str], dict[str, int]], top: str, name: str) -> str:
    """Format the difference of right answers to the base over the questions of both data sets, paired."""
    base, other = right[top, "base"], right.get((top, name), {})
    gaps = [other[key] - base[key] for key in base if other.get(key) is not None]
    return estimate_gap(np.array(gaps, dtype=float)) if gaps else "–"


def estimate_gap(differences: Any) -> str:
    """Format the mean of paired differences in points, with the bootstrap interval that `knowgate` prints."""
    from knowgate.stats.bootstrap import estimate_mean

    gap = estimate_mean(differences)
    return format_gap({"value": gap.value or 0.0, "low": gap.low or 0.0, "high": gap.high or 0.0})
