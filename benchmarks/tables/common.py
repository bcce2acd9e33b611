"""What every table is made with: where the runs lie, rows to Markdown, each data set evaluated once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1]
RUNS = HERE / "runs"
QWEN, SMOLLM = "qwen2.5-coder-1.5b", "smollm"
MODELS = {
    QWEN: "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M weights, run in bf16 on one H200)",
    SMOLLM: "SmolLM2-135M-Instruct (the embedded model, run in fp32)",
}
DATA = ("triviaqa_ctx", "nq_ctx", "squad_ctx", "hotpotqa_ctx", "webqa_zh_ctx", "openbookqa")
SIGN = "dhicl:k=20,words=true/false,sign="
NAMES = {f"{SIGN}paper": "dhicl", f"{SIGN}code": "dhicl, code's sign", f"{SIGN}none": "dhicl, not calibrated"}
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
def evaluation(model: str, name: str) -> Any:
    """A data set of a model with all gates on record and all that rows allow; None where it was not recorded."""
    from knowgate.evaluation.comparison.evaluation import compare
    from knowgate.gates import score_gates
    from knowgate.runs import load_trial

    run = RUNS / model / f"{name}-test"
    if not run.is_dir():
        return None
    trial = load_trial([run], layers=())
    scored = [one for one in score_gates(trial, ["auto"]) if _is_shown(one.name)]
    return compare(trial, scored, resamples=RESAMPLES)


def evaluations(model: str, names: Sequence[str] = DATA) -> dict[str, Any]:
    """Every data set of a model that was recorded."""
    made = {name: evaluation(model, name) for name in names}
    return {name: one for name, one in made.items() if one is not None}


def _is_shown(gate: str) -> bool:
    """Variants of DH-ICL have a table of their own."""
    return not gate.startswith("dhicl") or gate in NAMES


def shown(gate: str) -> str:
    return NAMES.get(gate, gate)


def gate_names(found: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for one in found.values():
        names |= {gate.gate: None for gate in one.gates if "auroc" in gate.measures}
    return list(names)
