"""What every table is made with: where the runs lie, rows to Markdown, each data set evaluated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.names import is_main, with_names

HERE = Path(__file__).parents[1]
RUNS = HERE / "runs"
QWEN, SMOLLM = "qwen2.5-coder-1.5b", "smollm"
MODELS = {
    QWEN: "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M weights, run in bf16 on one H200)",
    SMOLLM: "SmolLM2-135M-Instruct (the embedded model, run in bf16 on one H200)",
}
DATA = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "webqa_zh_ctx", "openbookqa")  # with gates of both LLMs
OPEN = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "temporalqa_ctx", "webqa_zh_ctx", "cmrc2018_ctx")
CHOICE = ("openbookqa", "mmlu", "strategyqa_ctx", "cmmlu", "ceval")
GROUPS = {"Open questions": OPEN, "Multiple choice": CHOICE}
FRESH = "freshqa"  # closed-book only: there is no corpus for it
RESAMPLES = 2_000
Rows = list[tuple[str, ...]]


def table(columns: Sequence[str], rows: Rows) -> str:
    lines = [tuple(columns), ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bold_best(rows: Rows, columns: Sequence[int], skip: Sequence[str] = ()) -> Rows:
    """The highest number of each column in bold; what it is measured by is its first number."""
    cells = [list(row) for row in rows]
    for column in columns:
        values = [_first(row[column]) if row[0] not in skip else -np.inf for row in rows]
        best = max(values)
        for place, value in enumerate(values):
            if np.isfinite(best) and value == best:
                cells[place][column] = f"**{cells[place][column]}**"
    return [tuple(row) for row in cells]


def _first(cell: str) -> float:
    try:
        return float(cell.split()[0])
    except (ValueError, IndexError):
        return -np.inf


@cache
def trial_of(model: str, name: str) -> Any:
    """The test run of a data set, with what is on record under the names of the tables; None where it was not made."""
    from knowgate.data.runs.table import load_label_table

    run = RUNS / model / f"{name}-test"
    if not run.is_dir():
        return None
    trial = load_label_table([run], layers=())
    return replace(trial, recorded_needs=with_names(trial.recorded_needs))


@cache
def evaluation(model: str, name: str) -> Any:
    """A data set of a model with all gates on record and all that rows allow; None where it was not recorded."""
    from knowgate.evaluation.gate_comparison import compare_gates
    from knowgate.gates.offline_scoring import score_gates

    trial = trial_of(model, name)
    if trial is None or trial.open_right is None:
        return None
    scored = [one for one in score_gates(trial, ["auto"]) if is_main(one.name)]
    return compare_gates(trial, scored, resamples=RESAMPLES)


def evaluations(model: str, names: Sequence[str] = DATA) -> dict[str, Any]:
    """Every data set of a model that was recorded."""
    made = {name: evaluation(model, name) for name in names}
    return {name: one for name, one in made.items() if one is not None}


def gate_names(found: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for one in found.values():
        names |= {gate.gate: None for gate in one.gates if "auroc" in gate.measures}
    return list(names)


def at_threshold(trial: Any, scores: Any) -> str:
    """'54.3 (91 %) / 51.8': accuracy (retrieval rate) at the gate's own threshold / retrieving at random as often."""
    return decided(trial, scores.needs > scores.threshold)


def decided(trial: Any, retrieve: Any, *, with_random: bool = True) -> str:
    """The same for given decisions; only the rate where there are no answers with passages."""
    rate = float(retrieve.mean())
    if trial.open_right is None:
        return f"({100 * rate:.0f} %)"
    closed, opened = trial.closed_right, trial.open_right
    random = rate * opened.mean() + (1 - rate) * closed.mean()
    beside = f" / {100 * random:.1f}" if with_random else ""
    return f"{100 * np.where(retrieve, opened, closed).mean():.1f} ({100 * rate:.0f} %){beside}"
