"""How often the server's alarm is false, and how soon it finds a drift: simulations over recorded answers.

`python -m benchmarks.alarm` prints the table of benchmarks/alarm.md. The recorded questions stand for the population. In each
simulated run, questions are drawn from it with replacement: some to choose a threshold with a guarantee
(Learn-then-Test), as many to compute the bound on changed answers, as `calibrate` does, and then audited requests for the
test that the server's `LossMonitor` runs. Runs in which the guarantee does not hold in the population are left out.

- Steady: requests come from the same population. Every alarm within `STEADY_REQUESTS` audits is false.
- Drift: so many requests are replaced by questions that the gate skips to their harm that the share of lost answers is
  twice the guaranteed one. The alarm should come within `DRIFT_REQUESTS` audits.

The former alarm compared the share of changed answers with the guaranteed loss; `former` is its share of false alarms.
Answers of Llama are read from the data set `gate_llama3_8b` in the folder of the variable KNOWGATE_BENCH.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tables.common import DATA, QWEN, RUNS, load_test_run, table
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.gates.arbiters.abstention import answers_differ
from knowgate.gates.calibration.guarantee import learn_then_test
from knowgate.gates.calibration.threshold_choice import GateOutcomes
from knowgate.gates.offline_scoring import score_gate
from knowgate.stats.confidence_sequences import GuaranteeTest
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.stats.proportions import upper_confidence_limit

DELTA = 0.05
RUNS_PER_ROW = 200
# Guaranteed loss, and number of questions to choose the threshold; as many are held out.
CALIBRATIONS = ((0.02, 2000), (0.05, 2000), (0.1, 2000))
STEADY_REQUESTS = 5000
MAX_CAPITAL = 1e200  # far above every alarm, and small enough not to overflow
DRIFT_REQUESTS = 2000


@dataclass(frozen=True)
class Population:
    """Recorded questions with a gate's needs, grades, and whether the two answers differ."""

    name: str
    needs: FloatArray
    closed_book_right: BoolArray
    open_book_right: BoolArray
    differs: BoolArray

    def is_lost(self, threshold: float) -> BoolArray:
        """Mark the questions that the gate skips to their harm."""
        return (self.needs <= threshold) & self.open_book_right & ~self.closed_book_right

    def is_changed(self, threshold: float) -> BoolArray:
        """Mark the questions whose answer the gate changes."""
        return (self.needs <= threshold) & self.differs


@dataclass(frozen=True)
class AlarmRate:
    """Results of the simulated runs of one population at one guaranteed loss.

    Attributes:
        runs: Number of runs in which the guarantee holds and the gate skips questions.
        changed: Mean share of changed answers.
        bound: Mean bound on it.
        false_alarms: Share of steady runs with an alarm.
        former_false_alarms: The same for an alarm at the guaranteed loss.
        found: Share of drifted runs with an alarm within `DRIFT_REQUESTS` audits.
        delay: Median number of audits until the alarm, where it came.
    """

    runs: int
    changed: float
    bound: float
    false_alarms: float
    former_false_alarms: float
    found: float
    delay: float


def simulate(population: Population, max_loss: float, questions: int, runs: int) -> AlarmRate:
    """Simulate runs of a server with a gate that was calibrated for this maximum loss on this many questions."""
    rng = np.random.default_rng(0)
    changes, bounds, steady, drifted = [], [], [], []
    for _ in range(runs):
        chosen, held_out = rng.integers(0, len(population.needs), (2, questions))
        outcomes = GateOutcomes(
            population.needs[chosen], population.closed_book_right[chosen], population.open_book_right[chosen]
        )
        threshold = learn_then_test(outcomes, max_loss, DELTA).threshold
        lost, changed = population.is_lost(threshold), population.is_changed(threshold)
        if not 0 < lost.mean() <= max_loss:
            continue
        changes.append(changed.mean())
        bounds.append(upper_confidence_limit(int(changed[held_out].sum()), questions, DELTA / 2))
        steady.append(changed[rng.integers(0, len(changed), STEADY_REQUESTS)])
        share = (2 * max_loss - lost.mean()) / (1 - lost.mean())
        is_new = rng.random(DRIFT_REQUESTS) < share
        drifted.append(changed[rng.integers(0, len(changed), DRIFT_REQUESTS)] | is_new)
    if not bounds:
        return AlarmRate(0, *([float("nan")] * 6))
    delays = find_alarms(np.array(bounds), DELTA / 2, np.array(drifted))
    found = np.isfinite(delays)
    return AlarmRate(
        len(bounds),
        float(np.mean(changes)),
        float(np.mean(bounds)),
        float(np.isfinite(find_alarms(np.array(bounds), DELTA / 2, np.array(steady))).mean()),
        float(np.isfinite(find_alarms(np.full(len(bounds), max_loss), DELTA, np.array(steady))).mean()),
        float(found.mean()),
        float(np.median(delays[found])) if found.any() else float("nan"),
    )


def find_alarms(limits: FloatArray, delta: float, changed: BoolArray) -> FloatArray:
    """Run the server's `GuaranteeTest` for many servers at once.

    Args:
        limits: Maximum share of changed answers, of each server.
        delta: Maximum probability of a false alarm.
        changed: Whether each audited answer is changed, with one row for each server.

    Returns:
        Number of audits until the alarm of each server; infinite if there is none.
    """
    bets = np.array([GuaranteeTest(float(limit), delta).bets for limit in limits])
    capital, delays = np.zeros_like(bets), np.full(len(limits), np.inf)
    unspent = 1 / (1 + np.log1p(np.arange(changed.shape[1] + 1)))
    for number, values in enumerate(changed.T.astype(float), 1):
        growth = 1 + bets * (values - limits)[:, None]
        capital = np.minimum((capital + unspent[number - 1] - unspent[number]) * growth, MAX_CAPITAL)
        is_alarm = capital.mean(axis=1) + unspent[number] >= 1 / delta
        delays[is_alarm & np.isinf(delays)] = number
    return delays


# --- recorded answers -----------------------------------------------------------------------------


def load_populations() -> Iterator[Population]:
    """Yield the recorded test questions of Qwen and, if its answers are available, of Llama."""
    names = [name for name in DATA if load_test_run(QWEN, name) is not None]
    qwen = load_label_table([RUNS / QWEN / f"{name}-test" for name in names], layers=())
    pairs = [(row.closed.text, row.open.text) if row.closed and row.open else None for row in qwen.rows]
    yield from (
        _make_population("Qwen2.5-Coder-1.5B", qwen, gate, pairs) for gate in ("logprob:min", "probe", "fusion")
    )
    answers = Path(os.environ.get("KNOWGATE_BENCH", "")) / "gate_llama3_8b" / "test.jsonl.gz"
    if answers.is_file():
        with gzip.open(answers, "rt", encoding="utf-8") as file:
            metas = {record["id"]: record["meta"] for record in map(json.loads, file)}
        llama = load_label_table([RUNS / "llama3.1-8b" / "gate_llama3_8b-test"], layers=())
        texts = [(metas[row.id]["pred_no_retrieval"], metas[row.id]["pred_one_retrieval"]) for row in llama.rows]
        yield _make_population("Llama-3.1-8B", llama, "fusion", texts)


def _make_population(
    model: str, trial: LabelTable, gate: str, pairs: list[tuple[str, str] | None] | list[tuple[str, str]]
) -> Population:
    """Make the population of one model and gate. `pairs` are the answers without and with passages of each question."""
    differs = np.array([pair is not None and answers_differ(*pair) for pair in pairs], dtype=bool)
    needs = score_gate(trial, gate).needs
    return Population(f"{model}, {gate}", needs, trial.closed_book_right, trial.retrieved_right, differs)


def main() -> None:
    """Print the table of false alarms and detected drifts."""
    rows = []
    for population in load_populations():
        for max_loss, questions in CALIBRATIONS:
            rate = simulate(population, max_loss, questions, RUNS_PER_ROW)
            if rate.runs:
                shares = (rate.changed, rate.bound, rate.former_false_alarms, rate.false_alarms, rate.found)
                cells = [f"{100 * share:.1f} %" for share in shares]
                delay = "-" if np.isnan(rate.delay) else f"{rate.delay:,.0f}"
                rows.append((population.name, f"{max_loss:.0%}", f"{questions:,}", str(rate.runs), *cells, delay))
    titles = ("LLM, gate", "guaranteed loss", "questions", "runs", "changed", "bound", "false alarms at the guaranteed loss",
              "false alarms at the bound", f"drift found in {DRIFT_REQUESTS:,}", "median delay")  # fmt: skip
    print(table(titles, rows))


if __name__ == "__main__":
    main()
