"""KBM, section 3: mastery and certainty correlate, and passages help less if either is high."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.tables.common import CHOICE, MODELS, OPEN, QWEN, RUNS, Rows, table

PAPER_R = 0.64
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 1.0)  # of the intervals; the last interval includes 1
POOLED = {
    "WebQA": ("webqa_zh_ctx",),
    "TriviaQA": ("triviaqa_ctx",),
    "seven open sets": OPEN,
    "five choice sets": CHOICE,
}
RESAMPLES = 1_000


def indicator_tables() -> Iterator[str]:
    """Render Pearson's r of each data set, then accuracy with and without passages by mastery and certainty."""
    yield "\n### Mastery and certainty (section 3.2)\n"
    yield (
        f"Pearson's r of closed-book mastery and certainty over the test questions, with a 95 % bootstrap interval. The "
        f"paper has {PAPER_R:.2f}. WebQA, TriviaQA, OpenBookQA and MMLU agree with it. Where the LLM knows less than a "
        "tenth, mastery is nearly constant and r falls; so it does where the LLM guesses between two to four options. "
        "The embedded 135M LLM knows too little for any r. Questions that were not answered with passages are left out (1 of "
        "500 of MMLU, 10 of CMMLU); `knowgate report` counts them. OpenBookQA's run has 499 questions.\n"
    )
    yield table(("data set", "LLM", "questions", "r", "mastery ≥ .8", "certainty ≥ .8"), list(_correlations()))
    yield "\n### What passages change, by closed-book mastery and certainty (Figure 3)\n"
    yield (
        "Greedy answers of Qwen2.5-Coder-1.5B; train and test questions together, so that the top intervals hold "
        "enough questions (no gate is involved). Each cell: questions, right without -> with passages, and how many of "
        "100 passages turn right (+) and wrong (-).\n"
    )
    for indicator in ("mastery", "certainty"):
        columns = (f"{indicator}", *POOLED)
        yield table(columns, _effects(indicator)) + "\n"


def _correlations() -> Iterator[tuple[str, ...]]:
    for model in MODELS:
        for name in (*OPEN, *CHOICE):
            rows = _read_rows(model, name, ("test",))
            if len(rows):
                mastery, certainty = rows[:, 0], rows[:, 1]
                counts = (str(int((values >= 0.8).sum())) for values in (mastery, certainty))
                yield (name, model, str(len(rows)), format_correlation(mastery, certainty), *counts)


def format_correlation(mastery: Any, certainty: Any) -> str:
    """Return '0.62 [0.55, 0.68]': Pearson's r with a 95 % bootstrap interval."""
    rng, values = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, len(mastery), len(mastery))
        if mastery[drawn].std() and certainty[drawn].std():
            values.append(np.corrcoef(mastery[drawn], certainty[drawn])[0, 1])
    if not values:
        return "–"
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{np.corrcoef(mastery, certainty)[0, 1]:.2f} [{low:.2f}, {high:.2f}]"


@functools.cache
def _read_rows(model: str, name: str, splits: tuple[str, ...]) -> Any:
    """Return (mastery, certainty, right without, right with passages) of all rows that have all four."""
    from knowgate.data.runs.folder import RunFolder

    values = [
        (row.closed.mastery, row.closed.certainty, row.closed.correct, row.open.correct)
        for split in splits
        if (RUNS / model / f"{name}-{split}").is_dir()
        for row in RunFolder(RUNS / model / f"{name}-{split}").rows()
        if row.closed is not None and row.open is not None
    ]
    return np.array([line for line in values if None not in line], dtype=float)


def _effects(indicator: str) -> Rows:
    pooled = {
        title: np.concatenate([rows for name in names if len(rows := _read_rows(QWEN, name, ("train", "test")))])
        for title, names in POOLED.items()
    }
    column = ("mastery", "certainty").index(indicator)
    lines: Rows = []
    for low, high in pairwise(EDGES):
        end = "]" if high == EDGES[-1] else ")"
        cells = (_effect_cell(rows[is_in_interval(rows[:, column], low, high)]) for rows in pooled.values())
        lines.append((f"[{low:g}, {high:g}{end}", *cells))
    return lines


def is_in_interval(values: Any, low: float, high: float) -> Any:
    """Mark the values of an interval; the last interval includes 1."""
    return (values >= low - 1e-9) & ((values < high - 1e-9) | (high == EDGES[-1]))


def _effect_cell(rows: Any) -> str:
    if not len(rows):
        return "0"
    closed, opened = rows[:, 2].astype(bool), rows[:, 3].astype(bool)
    helps, hurts = 100 * (opened & ~closed).mean(), 100 * (closed & ~opened).mean()
    return f"{len(rows)}: {100 * closed.mean():.0f} -> {100 * opened.mean():.0f} (+{helps:.0f}, -{hurts:.0f})"
