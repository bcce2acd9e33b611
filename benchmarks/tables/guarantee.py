"""Is the guarantee kept? Thresholds chosen on draws from a population whose risk is known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.tables.common import DATA, QWEN, RUNS, Rows, table, trial_of
from benchmarks.tables.names import with_names

DRAWS = 1_000
EPSILONS = (0.01, 0.02, 0.05, 0.1)
DELTA = 0.05


def guarantee_table() -> Iterator[str]:
    from knowgate.data.runs.table import load_label_table
    from knowgate.gates.calibration.guarantee import learn_then_test
    from knowgate.gates.calibration.threshold_choice import GateOutcomes
    from knowgate.gates.offline_scoring import score_gate

    names = [name for name in DATA if trial_of(QWEN, name) is not None]
    judges = [set(trial_of(QWEN, name).recorded_needs) for name in names]
    if not names:
        return
    trial = load_label_table([RUNS / QWEN / f"{name}-test" for name in names], layers=())
    trial = replace(trial, recorded_needs=with_names(trial.recorded_needs))
    shared = [gate for gate in trial.recorded_needs if all(gate in had for had in judges)]
    assert trial.open_right is not None
    yield "## The guarantee, kept?\n"
    yield (
        f"Is the promised loss kept? All {len(trial.rows)} test questions of Qwen are the population. {DRAWS} times, half as "
        "many are drawn with replacement, and the threshold is chosen on the drawn ones (Learn-then-Test, confidence "
        f"{1 - DELTA:.0%}). Its risk is the share of questions that are skipped to their harm. In the population that is known "
        f"exactly, and it may exceed epsilon in at most {DELTA:.0%} of the draws. The loss (accuracy of always minus accuracy) "
        "is lower than the risk, because skipping also keeps right answers that passages would have made wrong.\n"
    )
    rows: Rows = []
    harm, n = trial.open_right & ~trial.closed_right, len(trial.rows)
    for name in (*_chosen(shared), "logprob:min"):
        needs = score_gate(trial, name).needs
        for epsilon in EPSILONS:
            rng = np.random.default_rng(0)
            found = []
            for _ in range(DRAWS):
                drawn = rng.integers(0, n, n // 2)
                chosen = learn_then_test(
                    GateOutcomes(needs[drawn], trial.closed_right[drawn], trial.open_right[drawn]), epsilon, DELTA
                )
                skip = needs <= chosen.threshold
                right = np.where(skip, trial.closed_right, trial.open_right)
                found.append((1 - skip.mean(), (skip & harm).mean(), trial.open_right.mean() - right.mean()))
            rates, risks, losses = np.array(found).T
            rows.append((name, f"{epsilon:.0%}", f"{rates.mean():.1%}", f"{risks.mean():.2%}", f"{losses.mean():+.2%}",
                         f"{np.quantile(losses, 0.95):+.2%}", f"{(risks > epsilon).mean():.1%}"))  # fmt: skip
    columns = (
        "gate",
        "epsilon",
        "retrieval rate",
        "mean risk",
        "mean loss",
        "95 % of losses below",
        "draws with risk above epsilon",
    )
    yield table(columns, rows)


def _chosen(recorded: Sequence[str]) -> list[str]:
    """Fusion and IK's judge, where all runs have them."""
    judges = [name for name in recorded if name.startswith("ik") and name != "ik, text"]
    return [*(["fusion"] if "fusion" in recorded else []), *judges[:1]]
