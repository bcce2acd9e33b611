"""Test the guarantee: choose thresholds on samples of a population in which the risk is known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.tables.common import DATA, QWEN, RUNS, Rows, load_test_run, table
from benchmarks.tables.names import rename_gates

DRAWS = 1_000
EPSILONS = (0.01, 0.02, 0.05, 0.1)
DELTA = 0.05


def guarantee_table() -> Iterator[str]:
    """Render how often the risk exceeds the guaranteed bound."""
    from knowgate.data.runs.table import load_label_table
    from knowgate.gates.calibration.guarantee import learn_then_test
    from knowgate.gates.calibration.threshold_choice import GateOutcomes
    from knowgate.gates.offline_scoring import score_gate

    names = [name for name in DATA if load_test_run(QWEN, name) is not None]
    gates_per_run = [set(load_test_run(QWEN, name).recorded_needs) for name in names]
    if not names:
        return
    labels = load_label_table([RUNS / QWEN / f"{name}-test" for name in names], layers=())
    labels = replace(labels, recorded_needs=rename_gates(labels.recorded_needs))
    shared = [gate for gate in labels.recorded_needs if all(gate in gates for gates in gates_per_run)]
    assert labels.open_book_right is not None
    yield "## The guarantee, kept?\n"
    yield (
        f"Is the promised loss kept? All {len(labels.rows)} test questions of Qwen are the population. {DRAWS} times, half as "
        "many are drawn with replacement, and the threshold is chosen on the drawn ones (Learn-then-Test, confidence "
        f"{1 - DELTA:.0%}). Its risk is the share of questions that are skipped to their harm. In the population that is known "
        f"exactly, and it may exceed epsilon in at most {DELTA:.0%} of the draws. The loss (accuracy of always minus accuracy) "
        "is lower than the risk, because skipping also keeps right answers that passages would have made wrong.\n"
    )
    rows: Rows = []
    harm, n = labels.open_book_right & ~labels.closed_book_right, len(labels.rows)
    for name in (*_select_gates(shared), "logprob:min"):
        needs = score_gate(labels, name).needs
        for epsilon in EPSILONS:
            rng = np.random.default_rng(0)
            outcomes = []
            for _ in range(DRAWS):
                drawn = rng.integers(0, n, n // 2)
                chosen = learn_then_test(
                    GateOutcomes(needs[drawn], labels.closed_book_right[drawn], labels.open_book_right[drawn]),
                    epsilon,
                    DELTA,
                )
                skip = needs <= chosen.threshold
                right = np.where(skip, labels.closed_book_right, labels.open_book_right)
                outcomes.append((1 - skip.mean(), (skip & harm).mean(), labels.open_book_right.mean() - right.mean()))
            rates, risks, losses = np.array(outcomes).T
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


def _select_gates(recorded: Sequence[str]) -> list[str]:
    """Return fusion and the judge of IK, if all runs have them."""
    judges = [name for name in recorded if name.startswith("ik") and name != "ik, text"]
    return [*(["fusion"] if "fusion" in recorded else []), *judges[:1]]
