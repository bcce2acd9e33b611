"""KBM trained as in the paper: a judge trained with and without passages, and its second judgement.

    python -m benchmarks.tables.kbm_passages

The protocol is in `policy_protocol.md`. `benchmarks.paper_record` writes the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.paper_record import KBM, KBM_30, KBM_30_JUDGES, KBM_JUDGES, read_record
from benchmarks.tables.common import CHOICE, OPEN, QWEN, format_decisions, load_test_run, table
from knowgate.stats.metrics import auroc, sigmoid

RECORDED = "kbm"  # the judge recorded earlier: one epoch, without passages and multiple choice
TITLES = {
    "kbm_1_epoch": "1 epoch",
    "kbm_3_epochs": "3 epochs, weighted",
    "kbm30_1_epoch": "30 samples, 1 epoch",
    "kbm30_3_epochs": "30 samples, 3 epochs, weighted",
}
STRICT, HALF, CERTAIN = 0, 1, 2  # heads: mastery of at least .8, of at least .5, certainty
RESAMPLES = 2_000


def read_rows() -> list[dict[str, Any]]:
    """Read the judgements of both runs: 10 and 30 samples per train question."""
    return [*read_record(KBM), *read_record(KBM_30)]


def read_judgements(name: str, labels: Any, judge: str, side: str) -> Any:
    """Return P(True) of each head for the rows of a test run; NaN where there is no judgement."""
    known = {row["id"]: row[side][judge] for row in read_rows() if row["set"] == name and judge in row.get(side, {})}
    values = [known.get(row.id) or (np.nan,) * 3 for row in labels.rows]
    return sigmoid(np.array(values, dtype=float))


def list_judged_runs() -> dict[str, Any]:
    """Return the test runs that have judgements."""
    names = {row["set"] for row in read_rows()}
    return {
        name: labels for name in (*OPEN, *CHOICE) if name in names and (labels := load_test_run(QWEN, name)) is not None
    }


def list_recorded_judges() -> list[str]:
    """List the recorded judges."""
    judges = {judge for row in read_rows() for judge in row.get("without", {})}
    return [judge for judge in (*KBM_JUDGES, *KBM_30_JUDGES) if judge in judges]


def judge_table() -> str:
    """Render AUROC of known, own verdicts by mastery and certainty, and searches saved, for each judge."""
    from benchmarks.tables.claims import compute_savings, format_gold_savings

    rows = []
    for name, labels in list_judged_runs().items():
        right, recorded = np.asarray(labels.closed_book_right, dtype=bool), labels.recorded_needs.get(RECORDED)
        if recorded is not None:
            needs = np.asarray(recorded.needs, dtype=float)
            rows.append((name, "on record", f"{auroc(right, -needs) or 0.5:.3f}", "–", "–", "–",
                         f"{100 * compute_savings(labels, needs):.0f} %", format_gold_savings(labels)))  # fmt: skip
        for judge in list_recorded_judges():
            values = read_judgements(name, labels, judge, "without")
            if np.isnan(values[:, HALF]).any():
                continue
            needs, is_certain = 1 - values[:, HALF], values[:, CERTAIN] >= 0.5
            rows.append((name, TITLES[judge], f"{auroc(right, -needs) or 0.5:.3f}", format_decisions(labels, needs > 0.5),
                         f"{100 * is_certain.mean():.0f} %", format_decisions(labels, ~is_certain),
                         f"{100 * compute_savings(labels, needs):.0f} %", format_gold_savings(labels)))  # fmt: skip
    columns = ("data set", "judge", "AUROC of known", "own verdict by mastery ≥ .5", "says certain",
               "own verdict by certainty", "saved at -1.7", "gold mastery saves")  # fmt: skip
    return table(columns, rows)


def second_judgement_table() -> str:
    """Render right answers if passages are dropped that the judge finds insufficient, or worse than none (Figure 8)."""
    rows = []
    for name, labels in list_judged_runs().items():
        if labels.open_book_right is None:
            continue
        for judge in list_recorded_judges():
            without, with_passages = (
                read_judgements(name, labels, judge, side)[:, HALF] for side in ("without", "with")
            )
            has_passages = ~np.isnan(with_passages)
            if not has_passages.any():
                continue
            sufficient = ~has_passages | (with_passages >= 0.5)
            better = ~has_passages | (with_passages >= without)
            closed, opened = (
                np.asarray(right, dtype=float) for right in (labels.closed_book_right, labels.retrieved_right)
            )
            rows.append((name, TITLES[judge], f"{100 * opened.mean():.1f}", *_describe_rule(sufficient, closed, opened),
                         *_describe_rule(better, closed, opened),
                         f"{100 * np.maximum(closed, opened).mean():.1f}"))  # fmt: skip
    columns = (
        "data set",
        "judge",
        "keep all",
        "sufficient (paper)",
        "change",
        "better than without",
        "change",
        "oracle",
    )
    return table(columns, rows)


def _describe_rule(keeps: Any, closed: Any, opened: Any) -> tuple[str, str]:
    """Return '50.2 (90 %)' (right, passages shown) and '+0.4 [-0.2, +1.0]' against keeping all."""
    right = np.where(keeps, opened, closed)
    draws = np.random.default_rng(0).integers(0, len(right), (RESAMPLES, len(right)))
    low, high = 100 * np.quantile((right - opened)[draws].mean(axis=1), [0.025, 0.975])
    change = f"{100 * (right - opened).mean():+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"{100 * right.mean():.1f} ({100 * keeps.mean():.0f} %)", change


def passage_judge_tables() -> Iterator[str]:
    """Render the section, or nothing without a record."""
    if not read_record(KBM):
        return
    yield "\n### The judge taught with and without passages\n"
    yield (
        "One LoRA judge of Qwen2.5-Coder-1.5B, taught with 9,680 train questions of eleven data sets, multiple choice "
        "among them, and with 4,791 of them a second time together with their passages. Three epochs with class weights "
        "beside one epoch without. The rows *30 samples* are judges taught with 25,083 questions, 30 samples each, and "
        "with 6,251 of them a second time with passages, again 30 samples each. Otherwise, samples per train "
        "question without passages: 10, or 30 on TriviaQA, MMLU, CMMLU and C-Eval "
        "(3,580 questions; the paper has 30). One greedy answer with passages. On record: the judge of the tables above. "
        "Certain: certainty of at least .6, which a quarter of the train questions reach. Own verdict: accuracy (retrieval "
        "rate) / retrieving at random as often.\n"
    )
    yield judge_table()
    yield (
        "\nSecond judgement of the same judge. Sufficient: passages are kept where P(mastery with them) is at least .5, as "
        "in the paper. Better than without: where it is at least P(mastery without them). In brackets: share of questions "
        "answered with passages. Change: against keeping all, paired 95 % bootstrap interval.\n"
    )
    yield second_judgement_table()


if __name__ == "__main__":
    print("\n".join(passage_judge_tables()))
