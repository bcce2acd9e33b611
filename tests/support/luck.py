"""How often a report recommends a gate that has nothing to say, and one that has. `python -m tests.support.luck 400`.

Runs are simulated: answers right without and with passages are drawn, and needs that know of them as much as is asked.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import recommend
from tests.support.runs_by_hand import row, side, write_run
from tests.support.trials_by_hand import SETTINGS

GATES = 6
SITUATIONS = {  # P(right without passages), P(right with them | it was, | it was not)
    "knows little": (0.1, 0.8, 0.5),
    "knows half": (0.5, 0.8, 0.4),
    "passages do nothing": (0.7, 0.85, 0.3),
}
GAINING = ("knows little", "knows half")  # where a good gate has something to gain


def simulated_run(path: Path, situation: str, *, seed: int, n: int, knowing: float) -> Path:
    """knowing: how many standard deviations lie between the needs of what is known and what is not; 0: pure chance."""
    known, kept, helped = SITUATIONS[situation]
    draw = np.random.default_rng(seed)
    closed = draw.random(n) < known
    opened = draw.random(n) < np.where(closed, kept, helped)
    rows = [row(f"q{i}", side(bool(closed[i])), side(bool(opened[i])), question=f"what is {i}?") for i in range(n)]
    run = write_run(path, rows, **SETTINGS)
    needs = [1 / (1 + np.exp(-draw.normal(np.where(closed, -knowing, 0.0)))) for _ in range(GATES)]
    write_needs(run, [RecordedNeeds(f"gate {k}", 0.5, _by_id(one)) for k, one in enumerate(needs)])
    return run


def _by_id(needs: np.ndarray) -> dict[str, float]:
    return {f"q{i}": float(need) for i, need in enumerate(needs)}


def recommends_a_gate(run: Path) -> bool:
    """Whether the verdict says to use (or try) a gate; doing without retrieval is not one.

    No interval is resampled: they could only turn a recommendation down.
    """
    found = recommend(evaluate(runs=run, resamples=0))
    return found.is_positive and not found.is_without_retrieval


def recommended(trials: int, *, knowing: float, n: int = 300, situations: Sequence[str] = tuple(SITUATIONS)) -> int:
    """Of so many simulated runs, in these situations by turns, how many end with a gate recommended."""
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(trials):
            run = Path(folder) / str(seed)
            simulated_run(run, situations[seed % len(situations)], seed=seed, n=n, knowing=knowing)
            found += recommends_a_gate(run)
    return found


if __name__ == "__main__":
    TRIALS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for strength in (0.0, 3.0):
        for name in SITUATIONS:
            count = recommended(TRIALS, knowing=strength, situations=[name])
            sys.stdout.write(
                f"{name}, needs {strength:g} sd apart: a gate is recommended in {count} of {TRIALS} runs\n"
            )
