"""The page on recorded answers of Llama-3.1-8B, for which gates see only text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables.common import RESAMPLES, RUNS, Rows, table
from benchmarks.tables.gates import auroc_cell, rate_cell

GATES = ("skr", "ik, text", "adaptive", "fusion", "fusion on benefit")


def llama_tables() -> Iterator[str]:
    """Render the page, or nothing without a record."""
    from knowgate.data.runs.table import load_label_table
    from knowgate.evaluation.gate_comparison import compare_gates
    from knowgate.gates.offline_scoring import score_gates

    run = RUNS / "llama3.1-8b" / "gate_llama3_8b-test"
    if not run.is_dir():
        return
    yield "## Llama-3.1-8B-Instruct, recorded answers (`gate_llama3_8b`): nothing but text\n"
    yield (
        "Answers recorded by others, open-book with one BM25 retrieval, graded by our `contains` with the echo guard "
        "([judge](judge.md), [policy](policy.md) and [systems](systems.md) take the data set's own grades, which are a little "
        "kinder: 32.8 % right without and 38.4 % with retrieval, here 32.5 and 38.0 %). No log-probabilities, no "
        "hidden states: gates see "
        "question and answer text alone, through the packaged MiniLM embeddings. Gain: points above "
        "retrieving at random "
        "at the same rate. Tuned: threshold chosen on 30 % of the rows, realised on the others, in points against the "
        "better of never and always there.\n"
    )
    labels = load_label_table([run], layers=())
    kinds = [str(row.meta.get("dataset", "-")) for row in labels.rows]
    rows: Rows = []
    for kind in ["all", *sorted(set(kinds))]:
        indices = [index for index, own in enumerate(kinds) if kind in ("all", own)]
        part = labels.subset(indices)
        comparison = compare_gates(part, score_gates(part, GATES), resamples=RESAMPLES)
        lines = " / ".join(
            f"{comparison.gate(name).measures['accuracy'].value:.3f}" for name in ("never", "always", "oracle")
        )
        rows += [(f"{kind} ({len(indices)})", lines, name, *_gate_cells(comparison.gate(name))) for name in GATES]
    columns = (
        "data set (n)",
        "never / always / oracle",
        "gate",
        "AUROC of not known",
        "gain at 75 %",
        "gain at 50 %",
        "tuned",
    )
    yield table(columns, rows)


def _gate_cells(gate: Any) -> tuple[str, ...]:
    never, tuned = gate.frontier.accuracies[0], gate.tuned
    better = max(tuned.always, never)
    return (auroc_cell(gate), rate_cell(0.75)(gate), rate_cell(0.5)(gate),
            f"{100 * (tuned.accuracy - better):+.1f} @ {100 * tuned.rate:.0f} %")  # fmt: skip
