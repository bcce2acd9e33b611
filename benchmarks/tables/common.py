"""Shared parts of the tables: folders of the runs, Markdown rendering, cached evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.names import is_main_gate, rename_gates

HERE = Path(__file__).parents[1]
RUNS = HERE / "runs"
QWEN, SMOLLM = "qwen2.5-coder-1.5b", "smollm"
MODELS = {
    QWEN: "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M weights, run in bf16 on one H200)",
    SMOLLM: "SmolLM2-135M-Instruct (the embedded model, run in bf16 on one H200)",
}
DATA = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "webqa_zh_ctx", "openbookqa")  # recorded with both LLMs
OPEN = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "temporalqa_ctx", "webqa_zh_ctx", "cmrc2018_ctx")
CHOICE = ("openbookqa", "mmlu", "strategyqa_ctx", "cmmlu", "ceval")
GROUPS = {"Open questions": OPEN, "Multiple choice": CHOICE}
FRESH = "freshqa"  # closed-book only, because there is no corpus for it
RESAMPLES = 2_000
RESAMPLES_AT_ONCE = 250  # 10 MB for 10,000 questions
Rows = list[tuple[str, ...]]


def table(columns: Sequence[str], rows: Rows) -> str:
    """Render rows as a Markdown table."""
    lines = [tuple(columns), ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bold_best(rows: Rows, columns: Sequence[int], skip: Sequence[str] = ()) -> Rows:
    """Return the rows with the best cell of each column in bold. Cells are compared by their first number."""
    cells = [list(row) for row in rows]
    for column in columns:
        values = [_parse_first_number(row[column]) if row[0] not in skip else -np.inf for row in rows]
        best = max(values)
        for index, value in enumerate(values):
            if np.isfinite(best) and value == best:
                cells[index][column] = f"**{cells[index][column]}**"
    return [tuple(row) for row in cells]


def _parse_first_number(cell: str) -> float:
    try:
        return float(cell.split()[0])
    except (ValueError, IndexError):
        return -np.inf


@cache
def load_test_run(model: str, name: str) -> Any:
    """Return the label table of a test run, with gates named as in the tables; None if it was not recorded."""
    from knowgate.data.runs.table import load_label_table

    run = RUNS / model / f"{name}-test"
    if not run.is_dir():
        return None
    labels = load_label_table([run], layers=())
    return replace(labels, recorded_needs=rename_gates(labels.recorded_needs))


@cache
def evaluate_data_set(model: str, name: str) -> Any:
    """Evaluate all gates that are recorded or can be scored offline; None if the test run was not recorded."""
    from knowgate.evaluation.gate_comparison import compare_gates
    from knowgate.gates.offline_scoring import score_gates

    labels = load_test_run(model, name)
    if labels is None or labels.open_book_right is None:
        return None
    scored = [scores for scores in score_gates(labels, ["auto"]) if is_main_gate(scores.gate)]
    return compare_gates(labels, scored, resamples=RESAMPLES)


def resample_auroc(needed: Any, needs: Any, draws: Any) -> np.ndarray[Any, Any]:
    """Return the AUROC of scores on each bootstrap draw, a row of question numbers; 0.5 where it is not defined.

    Defined values are exactly those of `auroc(needed[draw], needs[draw])`, but questions are sorted only once.
    """
    from knowgate.stats.metrics import NeedRanking

    ranking, values = NeedRanking(needs), []
    for start in range(0, len(draws), RESAMPLES_AT_ONCE):
        counts = [np.bincount(draw, minlength=len(needs)) for draw in draws[start : start + RESAMPLES_AT_ONCE]]
        values.append(ranking.auroc(ranking.sort(np.array(counts, dtype=np.float32, order="F")), needed))
    return np.nan_to_num(np.concatenate(values), nan=0.5)


def evaluate_data_sets(model: str, names: Sequence[str] = DATA) -> dict[str, Any]:
    """Return the evaluation of every data set that was recorded for a model."""
    evaluations = {name: evaluate_data_set(model, name) for name in names}
    return {name: result for name, result in evaluations.items() if result is not None}


def list_gate_names(evaluations: dict[str, Any]) -> list[str]:
    """List the gates of all evaluations, in the order of their first appearance."""
    names: dict[str, None] = {}
    for result in evaluations.values():
        names |= {gate.gate: None for gate in result.gates if "auroc" in gate.measures}
    return list(names)


def format_at_threshold(labels: Any, scores: Any) -> str:
    """Return '54.3 (91 %) / 51.8': accuracy (retrieval rate) at the gate's own threshold / accuracy of random retrieval."""
    return format_decisions(labels, scores.needs > scores.threshold)


def format_decisions(labels: Any, retrieve: Any, *, with_random: bool = True) -> str:
    """Return the same text for given decisions; only the rate if there are no answers with passages."""
    rate = float(retrieve.mean())
    if labels.open_book_right is None:
        return f"({100 * rate:.0f} %)"
    closed, opened = labels.closed_book_right, labels.open_book_right
    random = rate * opened.mean() + (1 - rate) * closed.mean()
    random_part = f" / {100 * random:.1f}" if with_random else ""
    return f"{100 * np.where(retrieve, opened, closed).mean():.1f} ({100 * rate:.0f} %){random_part}"
