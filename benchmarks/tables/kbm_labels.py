"""KBM's labels with 30 samples of all train questions: correlation, certain questions, and the change from 10 samples.

    python -m benchmarks.tables.kbm_labels

`benchmarks.kbm_samples` makes the labels and `benchmarks.paper_record --samples` writes the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.paper_record import KBM_30_LABELS, read_record
from benchmarks.tables.common import CHOICE, FRESH, OPEN, QWEN, RUNS, table
from benchmarks.tables.kbm_indicators import EDGES, PAPER_R, format_correlation, is_in_interval

TAU = 0.6  # of certainty, as `kbm_samples` chose it by the protocol
FIRST_SAMPLES = 10
POOLED = {
    "WebQA": ("webqa_zh_ctx",),
    "TriviaQA": ("triviaqa_ctx",),
    "seven open sets": (*OPEN, FRESH),
    "five choice sets": CHOICE,
}


def read_labels(names: tuple[str, ...], *, with_passages: bool = False) -> dict[str, tuple[float, float]]:
    """Return mastery and certainty by question id, for the train questions of some data sets."""
    return {
        row["id"]: (row["mastery"], row["certainty"])
        for row in read_record(KBM_30_LABELS)
        if row["set"] in names and row["passages"] == with_passages
    }


def label_tables() -> Iterator[str]:
    """Render the section, or nothing without a record."""
    if not read_record(KBM_30_LABELS):
        return
    questions = sum(not row["passages"] for row in read_record(KBM_30_LABELS))
    yield "\n### Labels of all train questions with 30 samples\n"
    yield (
        f"{questions:,} train questions, 30 samples each as in the paper; no judge is involved. r is Pearson's correlation of "
        f"mastery and certainty (paper: {PAPER_R:.2f}). Certain: certainty of at least {TAU:g}, as the protocol chose. "
        "*Changed*: share of the questions of the first label run whose label differs now, for mastery of at least .5, of at "
        "least .8, and certain. Only sets whose first run had 10 samples are compared. Both runs have the same seed, so "
        "these 10 are nearly always among the 30; independent samples would change more labels.\n"
    )
    columns = ("data set", "questions", "r", "mastery ≥ .5", "mastery ≥ .8", "certain", "changed, .5", "changed, .8",
               "changed, certain")  # fmt: skip
    yield table(columns, [_describe_set(name) for name in (*OPEN, *CHOICE, FRESH) if read_labels((name,))])
    yield (
        "\nWith more questions, the correlation stays near the paper's on WebQA, TriviaQA, OpenBookQA and MMLU, and below it "
        "elsewhere. On open questions, 20 more samples change up to 4 % of the labels at .5; that is little, but "
        "so is the share of questions that reach .5 (0 to 17 %). On multiple choice they "
        "change 14 % (OpenBookQA) and 26 % (StrategyQA) at .5, because the LLM often guesses there. Where the first run also had "
        "30 samples, 1 % of the labels at .5 differ, as results on a GPU vary a little. *Certain* means something else with 30 "
        "samples, because the number of samples is the base of the entropy's logarithm: four equally frequent options have a "
        "certainty of .40 with 10 samples and of .59 with 30. So a threshold of certainty should be chosen for each number of "
        "samples, and separately for multiple choice. Of the 2,584 train questions of cmrc2018_ctx, 9 have a mastery of .5 or "
        "more, and 133 have at least one right sample.\n\n"
        "Share of certain questions by mastery. Last column: questions that also have 30 samples with passages, and their mean "
        "mastery without -> with passages.\n"
    )
    yield table(("mastery", *POOLED, "with passages"), list(_certain_by_mastery()))


def _describe_set(name: str) -> tuple[str, ...]:
    values = np.array(list(read_labels((name,)).values()))
    mastery, certainty = values[:, 0], values[:, 1]
    cells = [str(int((mastery >= limit).sum())) for limit in (0.5, 0.8)]
    certain = f"{100 * (certainty >= TAU).mean():.1f} %"
    return (name, f"{len(values):,}", format_correlation(mastery, certainty), *cells, certain, *measure_changes(name))


def measure_changes(name: str) -> tuple[str, ...]:
    """Return the share of train questions whose labels differ between 10 and 30 samples, for each kind of label."""
    from knowgate.data.runs.folder import RunFolder

    run = RunFolder(RUNS / QWEN / f"{name}-train")
    if run.manifest()["settings"]["samples"] != FIRST_SAMPLES:
        return ("–",) * 3
    labels = read_labels((name,))
    pairs = np.array(
        [
            (row.closed.mastery, row.closed.certainty, *labels[row.id])
            for row in run.rows()
            if row.closed is not None and row.id in labels
        ],
        dtype=float,
    )
    kinds = ((0, 0.5), (0, 0.8), (1, TAU))
    differ = ((pairs[:, column] >= limit) != (pairs[:, column + 2] >= limit) for column, limit in kinds)
    return tuple(f"{100 * part.mean():.1f} %" for part in differ)


def _certain_by_mastery() -> Iterator[tuple[str, ...]]:
    pooled = {title: np.array(list(read_labels(names).values())) for title, names in POOLED.items()}
    names = tuple(POOLED["seven open sets"] + POOLED["five choice sets"])
    alone, shown = read_labels(names), read_labels(names, with_passages=True)
    pairs = np.array([(alone[key][0], shown[key][0]) for key in shown if key in alone])
    for low, high in pairwise(EDGES):
        cells = (_certain_cell(values[is_in_interval(values[:, 0], low, high)]) for values in pooled.values())
        part = pairs[is_in_interval(pairs[:, 0], low, high)]
        end = "]" if high == EDGES[-1] else ")"
        change = f"{len(part)}: {part[:, 0].mean():.2f} -> {part[:, 1].mean():.2f}" if len(part) else "0"
        yield (f"[{low:g}, {high:g}{end}", *cells, change)


def _certain_cell(values: Any) -> str:
    return f"{len(values)}: {100 * (values[:, 1] >= TAU).mean():.0f} %" if len(values) else "0"


if __name__ == "__main__":
    print("\n".join(label_tables()))
