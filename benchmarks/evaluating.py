"""Twenty gates on 10,000 recorded rows with 2,000 bootstrap resamples; aim: < 60 s on two cores.

python benchmarks/evaluating.py [--gates 20] [--rows 10000]
"""

from __future__ import annotations

import argparse
import time

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    from knowgate.data.runs.rows import GradedAnswer, LabelRow
    from knowgate.data.runs.table import LabelTable
    from knowgate.evaluation.gate_comparison import compare_gates
    from knowgate.gates.offline_scoring import TableScores

    rng, n = np.random.default_rng(0), options.rows
    closed, opened = rng.random(n) < 0.3, rng.random(n) < 0.5
    sides = [
        (GradedAnswer("a b", correct=bool(c)), GradedAnswer("a b c", correct=bool(o)))
        for c, o in zip(closed, opened, strict=True)
    ]
    rows = [LabelRow(f"q{i}", f"q{i}", "en", closed=one, open=other) for i, (one, other) in enumerate(sides)]
    settings = {"model": "none", "grader": "contains"}
    trial = LabelTable(rows, [row.id for row in rows], [], settings)
    gates = [TableScores(f"gate {i}", 0.7 * rng.random(n) + 0.3 * ~closed, 0.5) for i in range(options.gates)]
    start = time.perf_counter()
    found = compare_gates(trial, gates)
    print(f"{options.gates} gates, {n} rows, {found.resamples} resamples: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
