"""Twenty gates on 10,000 recorded rows with 2,000 bootstrap resamples; aim: < 60 s on two cores.

python benchmarks/evaluating.py [--gates 20] [--rows 10000]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np


def make_trial(n_gates: int, n: int) -> tuple[Any, list[Any]]:
    """Return a table of made-up rows, and gates with scores for them."""
    from knowgate.data.runs.rows import GradedAnswer, LabelRow
    from knowgate.data.runs.table import LabelTable
    from knowgate.gates.offline_scoring import TableScores

    rng = np.random.default_rng(0)
    closed, opened = rng.random(n) < 0.3, rng.random(n) < 0.5
    sides = [
        (GradedAnswer("a b", correct=bool(c)), GradedAnswer("a b c", correct=bool(o)))
        for c, o in zip(closed, opened, strict=True)
    ]
    rows = [LabelRow(f"q{i}", f"q{i}", "en", closed=one, open=other) for i, (one, other) in enumerate(sides)]
    table = LabelTable(rows, [row.id for row in rows], [], {"model": "none", "grader": "contains"})
    return table, [TableScores(f"gate {i}", 0.7 * rng.random(n) + 0.3 * ~closed, 0.5) for i in range(n_gates)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    from knowgate.evaluation.gate_comparison import compare_gates

    trial, gates = make_trial(options.gates, options.rows)
    start = time.perf_counter()
    found = compare_gates(trial, gates)
    seconds = time.perf_counter() - start
    print(f"{options.gates} gates, {options.rows} rows, {found.resamples} resamples: {seconds:.1f} s")


if __name__ == "__main__":
    main()
