"""Measure how long it takes to compare gates on a label table, with all bootstrap intervals.

    python benchmarks/evaluating.py [--gates 20] [--rows 10000]

The target for 20 gates, 10,000 rows and 2,000 resamples is at most 30 s on two cores.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np


def make_random_table(n_gates: int, n_rows: int) -> tuple[Any, list[Any]]:
    """Return a label table of random rows, and gates with random scores for them."""
    from knowgate.data.runs.records import TableScores
    from knowgate.data.runs.rows import GradedAnswer, LabelRow
    from knowgate.data.runs.table import LabelTable

    rng = np.random.default_rng(0)
    closed, opened = rng.random(n_rows) < 0.3, rng.random(n_rows) < 0.5
    rows = [
        LabelRow(
            f"q{i}",
            f"q{i}",
            "en",
            closed=GradedAnswer("a b", correct=bool(closed_book_right)),
            open=GradedAnswer("a b c", correct=bool(open_book_right)),
        )
        for i, (closed_book_right, open_book_right) in enumerate(zip(closed, opened, strict=True))
    ]
    table = LabelTable(rows, [], {"model": "none", "grader": "contains"})
    return table, [TableScores(f"gate {i}", 0.5, 0.7 * rng.random(n_rows) + 0.3 * ~closed) for i in range(n_gates)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=20, help="number of gates")
    parser.add_argument("--rows", type=int, default=10_000, help="number of rows")
    options = parser.parse_args()
    from knowgate.evaluation.gate_comparison import compare_gates

    table, gates = make_random_table(options.gates, options.rows)
    start = time.perf_counter()
    comparison = compare_gates(table, gates)
    seconds = time.perf_counter() - start
    print(f"{options.gates} gates, {options.rows} rows, {comparison.resamples} resamples: {seconds:.1f} s")


if __name__ == "__main__":
    main()
